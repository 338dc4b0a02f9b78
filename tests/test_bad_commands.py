"""Bad settings and damaged files: every command tells them in one line with exit code 2, before the work starts.

Scripts run in this process: starting Python for every case would take most of the time.
"""

import ast
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from slow import fast_where, slow
from transformers import AutoModelForSeq2SeqLM

from fedecider.cross_silo import prepare as setup
from fedecider.cross_silo import results
from fedecider.data.store import file_sha256
from fedecider.federation.checksums import write_sums
from fedecider.models.recommender import Recommender
from fedecider.running.manifest import MANIFEST_FILE, verify, write_manifest
from fedecider.running.run_folder import check_output
from idgen.backbone import load_backbone
from idgen.tokenizer import load_tokenizer

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = {
    "domains": "crime",
    "num_rounds": 1,
    "num_threads": 1,
    "local_epochs": 1,
    "lora_rank": 2,
    "num_beams": 20,
    "num_eval_users": 5,
    "eval_batch_size": 60,
    "pretrain": {
        "text_encoder": "tfidf",
        "ids": "keywords",
        "samples": {"templates": "compact", "max_history": 3, "max_source_tokens": 64},
        "backbone": {"d_model": 16, "num_layers": 2},
        "train": {"max_steps": 2, "batch_size": 64},
    },
    "distill": {"epochs": 0},
}
RUN = "runs/whole"


def main(script: str, *words: str) -> int:
    first = sys.path[0]
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    finally:
        sys.path[0] = first


def changed(values: dict, *path: str, to: object) -> dict:
    """A copy of ``values`` with another value at ``path``."""
    name, *rest = path
    return {**values, name: changed(values[name], *rest, to=to) if rest else to}


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder with one finished run of one domain, ``runs/whole``."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(results, "run_page", lambda root, result: root)
        assert main("federate", "--config", "tiny.yaml", "--output", RUN) == 0
    return folder


@pytest.fixture
def inside(playground, monkeypatch):
    monkeypatch.chdir(playground)
    return playground


@pytest.fixture
def copy(inside, tmp_path):
    """A copy of the run that may be damaged."""
    return Path(shutil.copytree(inside / RUN, tmp_path / "copy"))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refused(capsys, expected: str, script: str, *words: str) -> str:
    """The one line on stderr of a call that ends with code 2; ``expected`` stands in it."""
    capsys.readouterr()
    code = main(script, *words)
    error = capsys.readouterr().err
    assert code == 2, error
    assert expected in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 1100
    return error


@pytest.fixture
def _no_work(monkeypatch):
    """Whatever is refused here must be refused before a stage is built."""
    import fedecider.lifecycle.evaluate  # noqa: F401 (else it would take the name from below, and keep it)

    def build(*arguments, **options):
        raise AssertionError("work has begun")

    for name in ("pretrain_stage", "distill_stage"):
        monkeypatch.setattr(setup, name, build)


SETTINGS = {
    "a number for a block": (changed(TINY, "pretrain", to=5), "pretrain"),
    "an empty block": (changed(TINY, "pretrain", to=None), "pretrain"),
    "a number for an inner block": (changed(TINY, "pretrain", "train", to=3), "pretrain.train"),
    "a text for a block": (changed(TINY, "pretrain", to="tiny.yaml"), "pretrain"),
    "no seed": (changed(TINY, "seed", to=None), "seed"),
    "no value deep inside": (changed(TINY, "pretrain", "train", "max_steps", to="many"), "max_steps"),
    "no flag": (changed(TINY, "resume", to=None), "resume"),
    "an empty method block": (changed(TINY, "fedecider", to=None), "fedecider"),
    "a wrong-typed method block": (changed(TINY, "fedecider", to=5), "fedecider"),
    "no value in a method block": (changed(TINY, "fedecider", to={"alpha_init": None}), "alpha_init"),
    "a path as name": (changed(TINY, "pretrain.train", to={"max_steps": 3}), "pretrain.train"),
    "a number as name": (changed(TINY, "pretrain", 3, to=3), "3"),
    "a config in a config": (changed(TINY, "config", to="tiny.yaml"), "config"),
    "nothing": (None, "bad.yaml"),
    "a list": ([TINY], "bad.yaml"),
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.usefixtures("inside", "_no_work")
def test_bad_settings_in_a_file(case, tmp_path, capsys):
    content, expected = SETTINGS[case]
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(content))
    refused(capsys, expected, "federate", "--config", str(tmp_path / "bad.yaml"), "--output", "runs/bad")
    assert not Path("runs/bad").exists()


def aliases(levels: int) -> str:
    lines = ["l0: &l0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"l{n}: &l{n} [{','.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


RAW = {
    "aliases of aliases": (aliases(9).encode(), "aliases"),
    "an alias in its own anchor": (b"a: &a [*a]", "aliases"),
    "many levels": (b"a: " + b"[" * 5000 + b"]" * 5000, "levels"),
    "a long file": (b"a: [" + b"1," * 100_000 + b"]", "characters"),
    "UTF-16": (yaml.safe_dump(TINY).encode("utf-16"), "UTF-8"),
    "an open bracket": (b"num_rounds: [3", "YAML"),
    "an impossible date": (b"num_rounds: 2020-13-45", "YAML"),
    "a list as name": (b"{[1]: 2}", "YAML"),
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.timeout(20)  # the nested aliases stand for a thousand million values
@pytest.mark.usefixtures("inside", "_no_work")
def test_a_file_that_is_no_settings(case, tmp_path, capsys):
    content, expected = RAW[case]
    (tmp_path / "bad.yaml").write_bytes(content)
    for words in ((), ("--method", "fedmf", "--dataset", "x"), ("--method", "fedavg")):
        assert "bad.yaml" in refused(capsys, expected, "federate", *words, "--config", str(tmp_path / "bad.yaml"))


LINE = {
    "unknown option": ("federate", ("--nope", "1"), "nope"),
    "shortened option": ("federate", ("--num_round", "1"), "num_round"),
    "option without value": ("federate", ("--num_rounds",), "--num_rounds"),
    "no number": ("federate", ("--num_rounds", "x"), "num_rounds"),
    "stray word": ("federate", ("stray",), "stray"),
    "a number for a block": ("federate", ("--pretrain", "5"), "pretrain"),
    "no config": ("federate", ("--config", "nowhere.yaml"), "nowhere.yaml"),
    "a folder as config": ("federate", ("--config", "runs"), "runs"),
    "two configs": ("federate", ("--config", "tiny.yaml", "--config", "tiny.yaml"), "twice"),
    "nested aliases": ("compare", ("--rows", f"{{{aliases(9)}}}".replace("\n", ", ")), "aliases"),
    "a file as output": ("federate", ("--output", "tiny.yaml"), "tiny.yaml"),
    "a file as output of a table": (
        "compare",
        ("--rows", "{local: {}}", "--seeds", "1", "--output", "tiny.yaml"),
        "tiny",
    ),
    "unknown layers": ("federate", ("--config", "tiny.yaml", "--lora_targets", "q,query"), "query"),
    "a rate of no adapter": (
        "federate",
        ("--config", "tiny.yaml", "--output_lr_multiplier", "3"),
        "output_lr_multiplier",
    ),
    "layers of another kind": ("federate", ("--config", "tiny.yaml", "--lora_targets", "wi_0"), "wi_0"),
    "tracker without package": ("federate", ("--config", "tiny.yaml", "--tracker", "clearml"), "clearml"),
    "tracker of the extra": ("federate", ("--tracker", "tensorboard,wandb"), "pip install 'fedecider[track]'"),
    "unknown tracker": ("federate", ("--tracker", "excel"), "tensorboard"),
    "a list as method": ("compare", ("--rows", "{a: {method: [1]}}", "--seeds", "1"), "method [1]"),
    "a number as row": ("compare", ("--rows", "{local: 5}", "--seeds", "1"), "rows"),
    "a bad option of a row": ("compare", ("--rows", "{local: {num_rounds: x}}", "--seeds", "1"), "the row local"),
    "nonsense device": (
        "recommend",
        ("--run", RUN, "--domain", "crime", "--history", "x", "--device", "abacus"),
        "abacus",
    ),
    "device that is not there": (
        "recommend",
        ("--run", RUN, "--domain", "crime", "--history", "x", "--device", "cuda:99"),
        "cuda:99",
    ),
    "empty history": ("recommend", ("--run", RUN, "--domain", "crime", "--history", " | "), "empty history"),
    "a path as domain": (
        "recommend",
        ("--run", RUN, "--domain", "../adapters/crime", "--history", "x"),
        "found ['crime']",
    ),
    "phases without an ID generator": (
        "federate",
        ("--config", "tiny.yaml", "--pretrain.alternating_phases", "1"),
        "alternating",
    ),
    "a secure sum of single uploads": (
        "federate",
        ("--config", "tiny.yaml", "--domains", "crime,comics", "--secure_sum", "true"),
        "secure_sum",
    ),
    "a secure sum of one client": (
        "federate",
        ("--method", "fedavg", "--config", "tiny.yaml", "--secure_sum", "true"),
        "secure_sum",
    ),
    "no run": ("evaluate", ("--run", "runs/none"), "no run in"),
    "no option": ("evaluate", (), "run"),
    "a tolerance below 0": ("evaluate", ("--run", RUN, "--tolerance", "-1"), "tolerance"),
}


@pytest.mark.parametrize("case", LINE)
@pytest.mark.usefixtures("_no_work")
def test_a_bad_command_line(case, inside, capsys, monkeypatch):
    script, words, expected = LINE[case]
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["tensorboard"])
    before = files(inside)
    refused(capsys, expected, script, *words)
    assert files(inside) == before


def test_an_output_may_be_new_or_an_empty_folder_but_not_read_only(tmp_path):
    check_output(tmp_path / "a" / "b")
    check_output(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="link"):
        check_output(tmp_path / "link" / "run")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="nothing may be written"):
            check_output(tmp_path / "locked" / "run")


def test_a_quantised_run_without_bitsandbytes_is_told_before_the_stages(inside, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("idgen.quantize.find_spec", lambda package: None)
    cache, run = tmp_path / "cache", tmp_path / "run"
    words = ("--config", "tiny.yaml", "--cache", str(cache), "--output", str(run), "--quantize", "nf4")
    assert "pip install '.[gpu]'" in refused(capsys, "bitsandbytes is not installed", "federate", *words)
    assert not cache.exists()
    assert not run.exists()
    refused(capsys, "quantize", "federate", *words[:-1], "fp4")


def test_a_run_does_not_go_on_with_another_reader_of_texts(copy, capsys):
    """``auto`` stood for TF-IDF in older versions where no encoder was installed."""
    words = ["--config", "tiny.yaml", "--pretrain.text_encoder", "auto", "--output", str(copy), "--resume", "true"]
    record = json.loads((copy / "run.json").read_text())
    of_auto = changed(record, "config", "run", "pretrain", "text_encoder", to="auto")
    (copy / "run.json").write_text(json.dumps(of_auto))
    assert record["data"]["text encoder"] == "tfidf"
    refused(capsys, "holds a run of another configuration: the data", "federate", *words)


def test_a_stage_without_its_teacher_is_told_before_the_rounds(inside, tmp_path, capsys):
    shutil.copytree(".cache", tmp_path / "cache")
    (stage,) = (tmp_path / "cache").glob("pretrain-*")
    (stage / "backbone" / "model.safetensors").unlink()
    words = ("--config", "tiny.yaml", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "run"))
    assert str(stage) in refused(capsys, "model.safetensors", "federate", *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("domain", [(), ("--domain", "crime")])
def test_a_run_that_did_not_finish_recommends_nothing(domain, copy, capsys):
    shutil.rmtree(copy / "adapters")
    assert f"--output {copy}" in refused(
        capsys, "it did not finish. Go on with it", "recommend", "--run", str(copy), *domain
    )


def test_an_embedding_run_is_not_evaluated_or_recommended_from(copy, capsys):
    record = json.loads((copy / "run.json").read_text())
    del record["config"]["ranking"]
    (copy / "run.json").write_text(json.dumps(changed(record, "config", "run", "method", to="fedmf")))
    for script, words in {"evaluate": (), "recommend": ("--domain", "crime", "--history", "x")}.items():
        refused(capsys, "cross-device track", script, "--run", str(copy), *words)


CUT = object()
ANYTHING = {"empty": "{}", "a list": "[1]", "a number": "3", "cut off": CUT, "nothing": ""}
INFERENCE = "adapters/crime/inference_config.json"
READ_ALONE = {"metrics.json": ("evaluate",), INFERENCE: ("recommend",)}
"""What one of the commands has no need of."""
JSON = ("run.json", *READ_ALONE, "adapters/crime/adapter_config.json")
JSON = (*JSON, "adapters/crime/item_ids.json", "backbone/config.json", MANIFEST_FILE)


def damage(path: Path, content: object) -> None:
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if content is CUT else str(content))


@pytest.mark.parametrize("damaged", JSON)
@pytest.mark.parametrize("content", ANYTHING)
def test_a_damaged_file_is_named(damaged, content, copy, capsys):
    """Also where the checksums were made anew: the files themselves are checked too."""
    damage(copy / damaged, ANYTHING[content])
    if damaged != MANIFEST_FILE:
        write_manifest(copy)
    title = next(iter(json.loads((Path(RUN) / "adapters/crime/item_ids.json").read_text())["items"]))
    scripts = {"recommend": ("--domain", "crime", "--history", title), "evaluate": ()}
    for script in READ_ALONE.get(damaged, scripts):
        name = "backbone" if damaged == "backbone/config.json" else damaged
        refused(capsys, name, script, "--run", str(copy), *scripts[script])


VALUES = {
    "no samples": (INFERENCE, ("samples",), None, "samples"),
    "wrong samples": (INFERENCE, ("samples", "max_history"), "x", "max_history"),
    "wrong beams": (INFERENCE, ("ranking", "num_beams"), None, "num_beams"),
    "no encoder": ("run.json", ("config", "run", "pretrain"), None, "run.json"),
    "infinite weights": (INFERENCE, ("alpha", "crime"), 1e999, INFERENCE),
    "a list as weights": (INFERENCE, ("alpha",), [1.0], INFERENCE),
    "other layers": ("adapters/crime/adapter_config.json", ("target_modules",), ["q"], "adapter_config.json"),
    "negative rank": ("adapters/crime/adapter_config.json", ("r",), -5, "adapter_config.json"),
    "another rank": ("adapters/crime/adapter_config.json", ("r",), 3, "adapter_config.json"),
    "another kind": ("adapters/crime/adapter_config.json", ("peft_type",), "PROMPT_TUNING", "adapter_config.json"),
    "text as width": ("backbone/config.json", ("d_model",), "x", "backbone"),
    "another width": ("backbone/config.json", ("d_model",), 18, "backbone"),
    "another family": ("backbone/config.json", ("model_type",), "bart", "backbone"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_wrong_value_in_a_file_is_named(case, copy, capsys):
    damaged, path, value, expected = VALUES[case]
    content = json.loads((copy / damaged).read_text())
    (copy / damaged).write_text(json.dumps(changed(content, *path, to=value)))
    write_manifest(copy)
    refused(capsys, expected, "recommend", "--run", str(copy), "--domain", "crime", "--history", "x")


ITEMS = {
    "no title": {"title": None},
    "text as tokens": {"tokens": "12"},
    "no tokens": {"tokens": []},
    "negative token": {"tokens": [-1]},
    "token that is none": {"tokens": [10**9]},
    "huge token": {"tokens": [10**30]},
    "fraction of a token": {"tokens": [1.5]},
    "end token": {"tokens": [1]},
}


@pytest.mark.parametrize("case", ITEMS)
def test_a_wrong_item_is_named(case, copy, capsys):
    path = copy / "adapters/crime/item_ids.json"
    content = json.loads(path.read_text())
    first = next(iter(content["items"]))
    path.write_text(json.dumps(changed(content, "items", first, to=content["items"][first] | ITEMS[case])))
    write_manifest(copy)
    refused(capsys, "item_ids.json", "recommend", "--run", str(copy), "--domain", "crime", "--history", "x")


STAGE_IDS = {
    **{name: (content, ()) for name, content in ANYTHING.items() if name != "empty"},
    "other keys": ([], ("item_keys",)),
    "no items": (None, ("items",)),
    "a list as items": ([1], ("items",)),
    "too few texts": (["a b"], ("items", "texts")),
    "text as tokens": (["12"], ("items", "token_ids")),
    "a surplus field": (3, ("items", "surplus")),
}


@pytest.mark.parametrize("case", fast_where(("a list", "other keys", "text as tokens"), STAGE_IDS))
def test_damaged_ids_of_a_stage_are_named(case, inside, tmp_path, capsys, monkeypatch):
    content, path = STAGE_IDS[case]
    shutil.copytree(".cache", tmp_path / "cache")
    (ids,) = (tmp_path / "cache").glob("pretrain-*/ids/crime.json")
    if path:
        ids.write_text(json.dumps(changed(json.loads(ids.read_text()), *path, to=content)))
    else:
        damage(ids, content)
    words = ("--config", "tiny.yaml", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "run"))
    refused(capsys, "crime", "federate", *words)
    assert not (tmp_path / "run").exists()


def test_tokens_beyond_the_tokenizer_are_told_before_the_rounds(inside, tmp_path, capsys):
    shutil.copytree(".cache", tmp_path / "cache")
    (ids,) = (tmp_path / "cache").glob("pretrain-*/ids/crime.json")
    content = json.loads(ids.read_text())
    content["items"]["token_ids"][3] = [10**9]
    ids.write_text(json.dumps(content))
    write_sums(ids.parents[1])  # whoever edits a stage may write its sums anew
    words = ("--config", "tiny.yaml", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "run"))
    refused(capsys, "1000000000 in ids/crime.json", "federate", *words)
    assert not (tmp_path / "run").exists()


TENSORS = ("adapters/crime/adapter_model.safetensors", "backbone/model.safetensors")


@pytest.mark.parametrize("damaged", TENSORS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5])
def test_a_truncated_tensor_file_is_named(damaged, share, copy, capsys):
    path, table = copy / damaged, copy / "adapters/crime/item_ids.json"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    weights = file_sha256(copy / TENSORS[0])
    table.write_text(json.dumps({**json.loads(table.read_text()), "adapter_sha256": weights}))
    write_manifest(copy)
    refused(capsys, damaged, "recommend", "--run", str(copy), "--domain", "crime", "--history", "x")


def edit(name: str, field: str, value: object):
    def change(root: Path) -> None:
        (root / name).write_text(json.dumps({**json.loads((root / name).read_text()), field: value}))

    return name, change


def flip(name: str):
    def change(root: Path) -> None:
        content = bytearray((root / name).read_bytes())
        content[-5] ^= 1
        (root / name).write_bytes(content)

    return name, change


HANDED = {
    "lora_alpha": edit("adapters/crime/adapter_config.json", "lora_alpha", 1),
    "target_modules": edit("adapters/crime/adapter_config.json", "target_modules", ["q", "k"]),
    "a bit of the backbone": flip("backbone/model.safetensors"),
    "a bit of the adapter": flip("adapters/crime/adapter_model.safetensors"),
    "the start token": edit("backbone/config.json", "decoder_start_token_id", 3),
    "a title": edit("adapters/crime/item_ids.json", "eos_token_id", 2),
    "a bit of the tokenizer": flip("backbone/tokenizer.json"),
    "the model card": ("adapters/crime/README.md", lambda root: (root / "adapters/crime/README.md").write_text("!")),
    "a surplus file": (
        "backbone/added_tokens.json",
        lambda root: (root / "backbone/added_tokens.json").write_text("{}"),
    ),
    "a missing file": (
        "backbone/tokenizer_config.json",
        lambda root: (root / "backbone/tokenizer_config.json").unlink(),
    ),
    "the checksums": (MANIFEST_FILE, lambda root: (root / MANIFEST_FILE).unlink()),
}


@pytest.mark.parametrize("case", HANDED)
def test_a_changed_hand_over_is_refused(case, copy, capsys):
    name, change = HANDED[case]
    change(copy)
    for script, words in {"recommend": ("--domain", "crime", "--history", "x"), "evaluate": ()}.items():
        error = refused(capsys, name, script, "--run", str(copy), *words)
        assert "--resume true" in error


def test_the_hand_over_is_complete_and_loads_without_its_checksums(copy, inside, capsys):
    manifest = json.loads((copy / MANIFEST_FILE).read_text())["files"]
    own = [
        path.relative_to(copy) for path in files(copy) if path.is_file() and path.name not in (".lock", MANIFEST_FILE)
    ]
    assert sorted(manifest) == sorted(path.as_posix() for path in own if path.parts[0] != "checkpoints")
    (copy / "backbone" / ".DS_Store").write_text("x")
    verify(copy, [copy / "backbone", copy / "adapters/crime"])
    loaded = Recommender.from_pretrained(copy, "crime")
    ranked = loaded.recommend([loaded.items.titles[0]], k=3)
    assert len(ranked) == 3
    (copy / MANIFEST_FILE).unlink()
    base = AutoModelForSeq2SeqLM.from_pretrained(copy / "backbone", use_safetensors=True)
    PeftModel.from_pretrained(base, str(copy / "adapters/crime"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_a_backbone_in_half_precision_is_read_in_full(dtype, copy, capsys):
    """With the adapter as it is; evaluating says by how much the metrics moved, if they did."""
    exact = Recommender.from_pretrained(copy, "crime")
    path, config = copy / "backbone/model.safetensors", copy / "backbone/config.json"
    halved = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(halved, path, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": str(dtype).removeprefix("torch.")}))
    write_manifest(copy)
    loaded = Recommender.from_pretrained(copy, "crime")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    titles = exact.items.titles[:2]
    scores = {item.key: item.score for item in exact.recommend(titles, k=90)}
    for item in loaded.recommend(titles, k=5):
        assert item.score == pytest.approx(scores[item.key], abs=0.2)
    if main("evaluate", "--run", str(copy)) == 2:
        assert "gives metrics that differ" in capsys.readouterr().err


def test_a_pickle_is_never_loaded(copy, capsys):
    """Not as a fallback either: loading one runs code."""
    for folder, name in {"backbone": "model", "adapters/crime": "adapter_model"}.items():
        (copy / folder / f"{name}.safetensors").rename(copy / folder / "kept")
        pickle = {"backbone": "pytorch_model.bin", "adapters/crime": "adapter_model.bin"}[folder]
        torch.save({}, copy / folder / pickle)
        write_manifest(copy)
        refused(capsys, f"{name}.safetensors", "recommend", "--run", str(copy), "--domain", "crime", "--history", "x")
        (copy / folder / "kept").rename(copy / folder / f"{name}.safetensors")
        (copy / folder / pickle).unlink()


def test_every_model_is_loaded_from_safetensors():
    """PeftModel is asked for the file itself before it looks for a pickle."""
    others = {"AutoTokenizer", "AutoConfig", "PeftModel", "Recommender", "T5Tokenizer"}
    calls = [
        (path.name, ast.unparse(call))
        for room in ("fedecider", "idgen", "distill", "embedding_fr", "scripts")
        for path in (REPOSITORY / room).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
        if ast.unparse(call.func.value) not in others
    ]
    assert len(calls) >= 3
    assert [call for call in calls if "use_safetensors=True" not in call[1]] == []


def test_missing_weights_are_not_drawn_at_random(copy):
    path = copy / "backbone/model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for .*SelfAttention\.q"):
        load_backbone(copy / "backbone", load_tokenizer(copy / "backbone"))
