"""Every config file parses for every method, and the paper-scale ones hold what the papers fix."""

import re
from pathlib import Path

import pytest
import yaml
from slow import fast_where, slow

from fedecider.data.prepare import PrepareConfig
from fedecider.experiment import comparison as plan
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.comparison import CompareConfig
from fedecider.methods import BUILT_IN as METHODS
from fedecider.running.options import build_parser, parse

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "fedecider" / "configs"
TABLES = sorted(path for path in (FOLDER / "compare").glob("*.yaml") if not path.stem.endswith("_runs"))
CONFIGS = sorted([*FOLDER.glob("*.yaml"), *(FOLDER / "compare").glob("*_runs.yaml")])
PAPER = [path for path in CONFIGS if path.stem in ("goodreads", "amazon")]


def settings(path, *words):
    return parse_settings("", ["--config", str(path), *words])


def preparation(path: Path) -> PrepareConfig:
    """The settings of the prepare_data.py command in the header."""
    lines = path.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "prepare_data.py" in line)
    words = []
    for line in lines[start:]:
        words += line.lstrip("# ").rstrip("\\").split()
        if not line.endswith("\\"):
            break
    options = dict(zip(words[2::2], words[3::2], strict=True))
    values = {name.removeprefix("--"): yaml.safe_load(value) for name, value in options.items()}
    return PrepareConfig(**values)


def pairs():
    """All configs with all methods; in the fast suite all configs with their own, and one with two others."""
    for path in CONFIGS:
        own = yaml.safe_load(path.read_text()).get("method", "fedecider")
        for method in METHODS:
            fast = method == own or (path == PAPER[0] and method in ("fdlora", "fellrec"))
            yield (pytest.param if fast else slow)(path, method, id=f"{path.stem}-{method}")


@pytest.mark.parametrize(("path", "method"), pairs())
def test_every_config_parses_for_every_method(path, method):
    found = settings(path, "--method", method)
    assert found.run.method == method
    assert isinstance(found.method, METHODS[method].config)
    content = yaml.safe_load(path.read_text())
    assert found.run.num_rounds == content["num_rounds"]
    assert found.training.local_epochs == content["local_epochs"]
    assert found.run.pretrain.backbone.name_or_path == content["pretrain"]["backbone"].get("name_or_path")


@pytest.mark.parametrize(
    "path",
    fast_where(lambda path: path.stem == "amazon_small_pool", TABLES),
    ids=lambda path: path.stem,
)
def test_every_line_of_a_table_parses(path, monkeypatch):
    """All but the data: they need not be prepared."""
    monkeypatch.chdir(FOLDER.parent)
    (config,) = parse(build_parser("", CompareConfig), ["--config", str(path)], CompareConfig)
    monkeypatch.setattr(plan, "load_data", lambda run: {})
    planned = plan.plan(config)
    assert set(planned) == set(config.rows)
    tuned = [label for label, options in config.rows.items() if not options]
    assert {len(planned[label]) for label in tuned} == {config.tune}
    folders = [run.folder.root for settings in planned.values() for runs in settings for run in runs]
    assert len(set(folders)) == len(folders)
    prepared, asked = preparation(Path(config.runs)), planned["local"][0][0].settings.run.domain_names
    assert asked == [f"{name}.*" if prepared.silos > 1 else name for name in prepared.domain_names]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_round": 3},
        {"pretrain": {"backbone": {"depth": 2}}},
        {"pretrain": {"train": {"precision": "fp16"}}},
        {"precision": "fp16"},
        {"fedecider": {"alpha_start": 1.0}},
        {"fedavg": {"alpha_init": 1.0}},
    ],
    ids=str,
)
def test_unknown_keys_and_fp16_are_errors(tmp_path, wrong, capsys):
    content = yaml.safe_load(PAPER[1].read_text())
    for name, value in wrong.items():
        if isinstance(value, dict) and name in content:
            for inner, entry in value.items():
                content[name][inner] = {**content[name][inner], **entry} if isinstance(entry, dict) else entry
        else:
            content[name] = value
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises((SystemExit, ValueError)) as stop:
        settings(path)
    if isinstance(stop.value, SystemExit):
        assert stop.value.code == 2
    last = wrong
    while isinstance(last, dict):
        name, last = next(iter(last.items()))
    assert name in capsys.readouterr().err + str(stop.value)


def test_goodreads_holds_what_the_papers_fix():
    found = settings(next(path for path in PAPER if path.stem == "goodreads"))
    run, pretrain = found.run, found.run.pretrain
    assert run.domain_names == ["crime", "comics", "children"]
    assert (run.num_rounds, run.lora_rank, run.participation) == (20, 8, 1.0)
    assert (found.training.local_epochs, found.training.batch_size, found.training.learning_rate) == (5, 64, 1e-3)
    assert (found.method.alpha_init, found.method.alpha_learning_rate, found.method.own_slot) == (
        2.0,
        1e-3,
        "normalized",
    )
    assert pretrain.backbone.name_or_path == "google-t5/t5-small"
    assert pretrain.ids == "generator"
    assert pretrain.id_generator == "nandakishormpai/t5-small-machine-articles-tag-generation"
    assert (pretrain.alternating_phases, pretrain.train.epochs) == (3, 30)
    samples = pretrain.samples
    assert (samples.templates, samples.user_wording) == ("natural", "prefix")
    assert (samples.max_history, samples.shown_history, samples.max_source_tokens) == (20, 20, 512)
    assert not samples.newest_first
    assert (pretrain.train.learning_rate, pretrain.train.batch_size) == (1e-3, 64)


def test_amazon_differs_from_goodreads_in_domains_and_rounds_only():
    amazon, goodreads = (yaml.safe_load(path.read_text()) for path in PAPER)
    assert amazon["domains"] == "beauty,clothing"
    assert amazon["num_rounds"] == 25
    for content in (amazon, goodreads):
        for name in ("domains", "data", "num_rounds"):
            del content[name]
    assert amazon == goodreads


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_scale_is_bf16_and_the_header_prepares_its_data(path):
    found = settings(path)
    run = found.run
    precisions = (found.training.precision, run.pretrain.train.precision, run.distill.precision)
    assert precisions == ("bf16", "bf16", "bf16")
    prepared = preparation(path)
    assert prepared.source == path.stem
    assert prepared.domain_names == run.domain_names
    assert prepared.output == run.data
    assert prepared.users_per_domain == {"goodreads": 5000, "amazon": 4000}[path.stem]
    pool = prepared.public_interactions_per_domain
    assert pool is not None
    assert pool * len(run.domain_names) == {"goodreads": 3000, "amazon": 2000}[path.stem]


def test_extras_hold_only_what_some_module_imports():
    text = (REPOSITORY / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    source = "".join(path.read_text() for path in (REPOSITORY / "fedecider").rglob("*.py"))
    for extra, names in re.findall(r"^(\w+) = \[(.*)\]$", text.split("\n[")[0], re.MULTILINE):
        if extra in (
            "dev",
            "browser",
            "docs",
            "track",
            "gpu",
        ):  # the rest: tests, site, accelerate
            continue
        for name in re.findall(r'"([\w-]+)', names):
            assert re.search(rf"^ *(import|from) {name.replace('-', '_')}[.\s]", source, re.MULTILINE), name


def test_the_package_says_that_it_is_typed():
    assert (REPOSITORY / "fedecider" / "py.typed").is_file()
    assert 'fedecider = ["py.typed", ' in (REPOSITORY / "pyproject.toml").read_text()


def test_the_small_model_on_real_domains_does_not_start_at_the_papers_fusion_weights():
    chosen = settings(FOLDER / "amazon_cpu.yaml")
    assert chosen.method.alpha_init == 0.4
