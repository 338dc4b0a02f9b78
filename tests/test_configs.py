"""Every config file parses for every method, and the paper-scale ones hold what the papers fix."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from slow import fast_where, slow

from fedecider.cross_silo import comparison as plan
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.comparison import CompareConfig
from fedecider.data.prepare import PrepareConfig
from fedecider.methods import METHODS
from fedecider.running.options import parse
from fedecider.running.settings_files import load_yaml

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER, OURS = REPOSITORY / "configs", REPOSITORY / "benchmarks" / "configs"
TABLES = sorted(path for path in (OURS / "compare").glob("*.yaml") if not path.stem.endswith("_runs"))
CONFIGS = sorted([*FOLDER.glob("*.yaml"), *OURS.glob("*.yaml"), *(OURS / "compare").glob("*_runs.yaml")])
PAPER = [OURS / "goodreads.yaml", FOLDER / "pretrained_t5.yaml"]


def settings(path, *words):
    return parse_settings(["--config", str(path), *words])


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
            yield (pytest.param if fast else slow)(path, method, id=f"{path.parent.name}/{path.stem}-{method}")


@pytest.mark.parametrize(("path", "method"), pairs())
def test_every_config_parses_for_every_method(path, method):
    exchanges = ("--ensemble.kind", "logit") if method == "counts" else ()
    found = settings(path, "--method", method, *exchanges)
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
    monkeypatch.chdir(REPOSITORY)
    (config,) = parse("", ["--config", str(path)], CompareConfig)
    monkeypatch.setattr(plan, "decided", lambda run: (replace(run, protocol="strict"), {}, []))
    entries = {entry.label: entry for entry in plan.plan(config).entries}
    assert set(entries) == set(config.rows)
    ahead = {label: entry.search.candidates[: entry.budget] for label, entry in entries.items()}
    tuned = [label for label, options in config.rows.items() if not options]
    assert {len(ahead[label]) for label in tuned} == {config.tune}
    runs = [
        entries[label].run.args[0](setting, seed)
        for label, settings in ahead.items()
        for setting in settings
        for seed in range(config.seeds)
    ]
    assert len({run.folder.root for run in runs}) == len(runs)
    local = next(run for run in runs if run.folder.root.name.startswith("local-"))
    prepared, asked = preparation(Path(config.runs)), local.settings.run.domain_names
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
def test_unknown_keys_and_fp16_are_errors(tmp_path, wrong):
    content = yaml.safe_load(PAPER[1].read_text())
    for name, value in wrong.items():
        if isinstance(value, dict) and name in content:
            for inner, entry in value.items():
                content[name][inner] = {**content[name][inner], **entry} if isinstance(entry, dict) else entry
        else:
            content[name] = value
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(content))
    last = wrong
    while isinstance(last, dict):
        name, last = next(iter(last.items()))
    with pytest.raises(ValueError, match=name):
        settings(path)


@pytest.mark.parametrize(
    ("text", "words", "wrong", "near"),
    [
        ("num_round: 3", (), "num_round", "num_rounds"),
        ("pretrain: {backbone: {d_modell: 3}}", (), "pretrain.backbone.d_modell", "pretrain.backbone.d_model"),
        ("pretrain: {bakbone: {d_model: 3}}", (), "pretrain.bakbone", "pretrain.backbone"),
        ("d_model: 3", (), "d_model", "pretrain.backbone.d_model"),
        ("fedecider: {alpha_strt: 1.0}", (), "alpha_strt", "alpha_"),
        ("xyzzy: 3", (), "xyzzy", ""),
        ("", ("--domainz", "crime"), "domainz", "domains"),
        ("", ("--pretrain.backbone.d_modell=3",), "pretrain.backbone.d_modell", "pretrain.backbone.d_model"),
        ("", ("--ensemble", "{knd: none}"), "ensemble.knd", "ensemble.kind"),
    ],
    ids=str,
)
def test_the_nearest_name_is_said(text, words, wrong, near, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(f"seed: 3\n{text}\n")
    with pytest.raises(ValueError, match=rf"got {wrong}\b.*{f'did you mean {near}' if near else 'no option[.]'}"):
        settings(path, *words)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("seed: 1\n# again\nseed: 2", "seed twice, in lines 1 and 3"),
        ("fedavg: {weighting: uniform, weighting: examples}", "weighting twice, in lines 1 and 1"),
        ("pretrain:\n  train:\n    epochs: 1\n    'epochs': 2", "epochs twice, in lines 3 and 4"),
        ("hyperparameter_candidates:\n- {schedule: cosine, schedule: linear}", "schedule twice"),
    ],
)
def test_a_name_that_stands_twice_is_an_error_with_its_lines(text, wrong, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (load_yaml, settings):
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{wrong}"):
            read(path)


def test_a_name_may_stand_in_several_blocks_and_an_alias_nowhere(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: {x: 1, y: 2}\nb: [{x: 1}, {x: 1}]\n")
    assert load_yaml(path) == {"a": {"x": 1, "y": 2}, "b": [{"x": 1}, {"x": 1}]}
    path.write_text("a: &a {x: 1, y: 2}\nb: *a\n")
    with pytest.raises(ValueError, match="aliases"):
        load_yaml(path)


def test_goodreads_holds_what_the_papers_fix():
    found = settings(OURS / "goodreads.yaml")
    run, pretrain = found.run, found.run.pretrain
    assert run.domain_names == ["crime", "comics", "children"]
    assert (run.num_rounds, run.lora_rank, run.participation) == (20, 8, 1.0)
    assert (found.training.local_epochs, found.training.batch_size, found.training.learning_rate) == (5, 64, 1e-3)
    assert (found.method.alpha_init, found.method.alpha_learning_rate) == (2.0, 1e-3)
    assert pretrain.backbone.name_or_path == "google-t5/t5-small"
    assert pretrain.ids == "generator"
    assert pretrain.id_generator == "nandakishormpai/t5-small-machine-articles-tag-generation"
    assert (pretrain.alternating_phases, pretrain.train.epochs) == (3, 30)
    samples = pretrain.samples
    assert samples.templates == "natural"
    assert (samples.max_history, samples.shown_history, samples.max_source_tokens) == (20, 20, 512)
    assert (pretrain.train.learning_rate, pretrain.train.batch_size) == (1e-3, 64)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_scale_is_bf16_and_the_header_prepares_its_data(path):
    amazon = path.stem == "pretrained_t5"
    found = settings(path, *(("--domains", "beauty,clothing", "--data", "data/amazon") if amazon else ()))
    run = found.run
    assert run.num_rounds == (25 if amazon else 20)
    precisions = (found.training.precision, run.pretrain.train.precision, run.distill.precision)
    assert precisions == ("bf16", "bf16", "bf16")
    prepared = preparation(path)
    assert prepared.source == ("amazon" if amazon else "goodreads")
    assert prepared.domain_names == run.domain_names
    assert prepared.output == run.data
    assert prepared.users_per_domain == (4000 if amazon else 5000)
    pool = prepared.public_interactions_per_domain
    assert pool is not None
    assert pool * len(run.domain_names) == (2000 if amazon else 3000)


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


@pytest.mark.parametrize(
    ("path", "method"),
    [
        (FOLDER / "companies.yaml", "fedavg"),
        (OURS / "amazon_silos.yaml", "fedavg"),
        (FOLDER / "domains.yaml", "fedecider"),
        (OURS / "amazon_t5.yaml", "fedecider"),
    ],
)
def test_companies_of_one_catalogue_average_and_domains_fuse_as_they_do_by_default(path, method):
    found = settings(path)
    assert found.run.method == method
    assert found.method == METHODS[method].config()
