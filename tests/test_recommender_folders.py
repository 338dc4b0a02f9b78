"""Folders of a recommender are not trusted: what they name stays inside."""

# ruff: noqa: F811 (fixtures of another file)

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from test_pretrained_recommender import copy, rec, run  # noqa: F401
from transformers import AutoModelForCausalLM

import fedecider
from fedecider.cli.main import main
from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.running.manifest import write_manifest
from fedecider.serve.config import ServeConfig
from fedecider.serve.run import load_recommenders

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def parts(run, tmp_path):
    """A copy of ``backbone/`` and ``adapters/`` alone, without checksums."""
    for name in ("backbone", "adapters"):
        shutil.copytree(run / name, tmp_path / "parts" / name)
    return tmp_path / "parts"


def write(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("place", "source"), [("adapters/crime", "."), ("adapters", "crime"), (".", "adapters/crime")])
def test_checksums_count_however_the_folder_is_named(parts, monkeypatch, place, source):
    write_manifest(parts)
    monkeypatch.chdir(parts / place)
    Recommender.from_pretrained(source)
    config = parts / "backbone" / "generation_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ValueError, match=r"generation_config\.json was changed"):
        Recommender.from_pretrained(source)


def test_what_a_site_has_recommends_and_serves_and_says_where_its_figures_are(run, rec, parts, capsys):
    """Where commands need the record of a run they say what the folder is, and what reads it."""
    for name in ("private", "metrics.json", "results.md"):
        (shutil.copytree if (run / name).is_dir() else shutil.copyfile)(run / name, parts / name)
    history = rec.items.titles[3]
    assert main(["recommend", "--run", str(parts), "--domain", "crime", "--history", history, "--json", "true"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["key"] == rec.recommend([history])[0].key
    served = load_recommenders(ServeConfig(run=str(parts)))
    assert served["crime"].recommend([history]) == rec.recommend([history])
    for command in ("report", "evaluate"):
        assert main([command, "--run", str(parts)]) == 2
        error = capsys.readouterr().err
        assert "an older version wrote it at a site of a deployment" in error
        assert "results.md and metrics.json, recommend and serve read it" in error


def test_the_lines_of_the_cards_and_of_the_docs_open_an_adapter_from_any_working_directory(run, tmp_path, monkeypatch):
    exported = fedecider.load(run).export(tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "run_folder.md").read_text()
    texts = [(place / "README.md").read_text() for place in (exported, exported / "adapters" / "crime")]
    expected = load_file(exported / "adapters" / "crime" / "adapter_model.safetensors")
    for text in [*texts, page[page.index("## backbone/ and adapters/") :]]:
        lines = re.search(r"^```py\n(.*?)^```$", text, re.M | re.S)[1].replace("FOLDER", str(exported))
        names = {"PeftModel": PeftModel, "AutoModelForCausalLM": AutoModelForCausalLM}
        exec(lines.replace("runs/x", str(exported)), names)
        state = get_peft_model_state_dict(names["model"], save_embedding_layers=False)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_ensemble_elsewhere_is_not_taken(run, parts, tmp_path):
    saved = shutil.copytree(parts / "adapters" / "crime", tmp_path / "some" / "saved")
    shutil.copytree(parts / "backbone", saved / "backbone")
    write(saved / "adapter_config.json", base_model_name_or_path="backbone")
    shutil.copytree(run / "private", tmp_path / "private")
    assert not Recommender.from_pretrained(saved).has_ensemble
    shutil.copytree(run / "private", parts / "private")  # where it lay in the run
    assert Recommender.from_pretrained(parts, "crime").has_ensemble


@pytest.mark.parametrize(
    "named", ["", ".", "..", "../../../backbone", "../backbone", "/", "~/x", "a/b/c", "us/../x", "-x"]
)
def test_a_backbone_is_inside_or_on_the_hub(parts, named):
    for folder in (parts.parent / "backbone", parts / "adapters" / "backbone", parts / "adapters" / "crime" / "a/b/c"):
        shutil.copytree(parts / "backbone", folder)
    write(parts / "adapters" / "crime" / "adapter_config.json", base_model_name_or_path=named)
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        Recommender.from_pretrained(parts, "crime")


def test_a_link_does_not_lead_a_backbone_outside(parts, tmp_path):
    (parts / "backbone").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="expected a folder of that name"):
        Recommender.from_pretrained(parts, "crime")
    (parts / "backbone").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ValueError, match="got a backbone outside of"):
        Recommender.from_pretrained(parts, "crime")


@pytest.mark.parametrize("domain", ["", ".", "..", "../../x", "/x", "a/b", "a\\b", ".crime", "a\nb", "C:x"])
def test_a_domain_is_the_name_of_a_folder(parts, domain):
    saved = parts / "adapters" / "crime"
    write(saved / "inference_config.json", domain=domain)
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        find_source(saved)


def test_a_hidden_folder_is_no_domain(copy, parts):
    for folder in (copy, parts):
        shutil.copytree(folder / "adapters" / "crime", folder / "adapters" / ".scratch-1-2-3-crime")
        assert find_source(folder).domains == ["comics", "crime"]
