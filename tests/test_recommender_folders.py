"""Folders of a recommender are not trusted: what they name stays inside, and what was changed is not saved."""

# ruff: noqa: F811 (fixtures of another file)

import json
import shutil
import stat

import pytest
from hub_toys import FolderHub
from test_pretrained_recommender import copy, rec, run  # noqa: F401

from fedecider.cli.main import main
from fedecider.models.folders import MANIFEST_FILE, write_manifest
from fedecider.models.hybrid import SETTINGS_FILE
from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.serve.config import ServeConfig
from fedecider.serve.run import load_recommenders

pytestmark = pytest.mark.whole


@pytest.fixture
def parts(run, tmp_path):
    """A copy of ``backbone/`` and ``adapters/`` alone, without checksums."""
    for name in ("backbone", "adapters"):
        shutil.copytree(run / name, tmp_path / "parts" / name)
    return tmp_path / "parts"


def write(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_upload_without_a_hybrid_takes_the_earlier_one_out(rec, tmp_path, monkeypatch):
    hub = FolderHub(tmp_path / "cache", monkeypatch)
    rec.push_to_hub("us/books", include_hybrid=True, api=hub)
    folder = next((tmp_path / "cache" / "models--us--books" / "snapshots").iterdir())
    (folder / "LICENSE").write_text("ours")
    (folder / "backbone" / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier upload")
    assert "hybrid/hybrid.json" in files(folder)
    rec.push_to_hub("us/books", api=hub)
    assert files(folder) == {"LICENSE", *files(rec.save_pretrained(tmp_path / "saved", published_name="us/books"))}
    assert not Recommender.from_pretrained("us/books").has_hybrid


def test_private_holds_for_a_repository_that_is_there(rec, tmp_path, monkeypatch):
    hub = FolderHub(tmp_path / "cache", monkeypatch)
    hub.create_repo("us/open", repo_type="model", private=False, exist_ok=False)
    with pytest.raises(ValueError, match="us/open"):
        rec.push_to_hub("us/open", api=hub)
    assert not (tmp_path / "cache").exists()
    assert rec.push_to_hub("us/open", private=False, api=hub).oid


def test_only_the_owner_reads_a_saved_hybrid(rec, tmp_path):
    saved = rec.save_pretrained(tmp_path / "saved", include_hybrid=True)
    places = (saved / "hybrid", *(saved / "hybrid").iterdir())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in places}
    assert modes == {"hybrid": 0o700, "hybrid.json": 0o600, "hybrid.safetensors": 0o600}


@pytest.mark.parametrize(
    "name", ["backbone/config.json", "adapters/crime/adapter_config.json", f"private/crime/{SETTINGS_FILE}"]
)
def test_files_that_were_changed_after_loading_are_not_saved(copy, tmp_path, name):
    rec = Recommender.from_pretrained(copy, "crime")
    path = copy / name
    path.write_text(path.read_text().replace("{", '{"added": 1,', 1).replace('"catalogue": "', '"catalogue": "0'))
    with pytest.raises(ValueError, match=r"was changed after|hybrid of another catalogue"):
        rec.save_pretrained(tmp_path / "saved", include_hybrid=True)
    assert not [one.name for one in tmp_path.iterdir() if "saved" in one.name]


def test_of_a_backbone_only_what_is_read_is_saved(parts, rec, tmp_path):
    (parts / "backbone" / "users.json").write_text("{}")
    (parts / "backbone" / "notes").mkdir()
    (parts / "backbone" / "notes" / "mine.txt").write_text("mine")
    saved = Recommender.from_pretrained(parts, "crime").save_pretrained(tmp_path / "saved")
    assert files(saved / "backbone") == files(rec.save_pretrained(tmp_path / "other") / "backbone")
    assert "config.json" in files(saved / "backbone")


def test_the_present_folder_is_no_place_to_save(rec, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", str(tmp_path / "here"), ""):
        with pytest.raises(ValueError, match="where the program works"):
            rec.save_pretrained(name)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert (rec.save_pretrained("inside") / "adapter_config.json").is_file()
    (tmp_path / "link").symlink_to(tmp_path / "there", target_is_directory=True)
    (tmp_path / "there").mkdir()
    rec.save_pretrained(tmp_path / "link")
    assert (tmp_path / "there" / "adapter_config.json").is_file()


@pytest.mark.parametrize(("place", "source"), [("adapters/crime", "."), ("adapters", "crime"), (".", "adapters/crime")])
def test_checksums_count_however_the_folder_is_named(parts, monkeypatch, place, source):
    write_manifest(parts, [parts / "backbone", *(parts / "adapters").iterdir()])
    monkeypatch.chdir(parts / place)
    Recommender.from_pretrained(source)
    config = parts / "backbone" / "generation_config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ValueError, match=r"generation_config\.json was changed"):
        Recommender.from_pretrained(source)


def test_the_card_of_what_a_site_hands_over_says_what_that_of_a_run_says(run, rec, parts, tmp_path):
    """Beside its adapter a site of a deployment has no record of a run."""
    shutil.copytree(run / "private", parts / "private")
    of_site = Recommender.from_pretrained(parts, "crime").save_pretrained(tmp_path / "site", include_hybrid=True)
    of_run = rec.save_pretrained(tmp_path / "run", include_hybrid=True)
    card = (of_site / "README.md").read_text()
    assert card == (of_run / "README.md").read_text()
    assert json.loads((of_site / "inference_config.json").read_text()) == json.loads(
        (of_run / "inference_config.json").read_text()
    )
    for said in ("## Data", "It was trained on events of the", "counts of real users. Do not share this folder"):
        assert said in card


def test_what_a_site_has_recommends_and_serves_and_says_where_its_figures_are(run, rec, parts, capsys):
    """Where commands need the record of a run they say what the folder is, and what reads it."""
    for name in ("private", "metrics.json", "results.md", "handover.json"):
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


def test_a_hybrid_elsewhere_is_not_taken(run, rec, parts, tmp_path):
    saved = rec.save_pretrained(tmp_path / "some" / "saved")
    shutil.copytree(run / "private", tmp_path / "private")
    assert not Recommender.from_pretrained(saved).has_hybrid
    (saved / MANIFEST_FILE).unlink()
    assert not Recommender.from_pretrained(saved).has_hybrid
    shutil.copytree(run / "private", parts / "private")  # where it lay in the run
    assert Recommender.from_pretrained(parts, "crime").has_hybrid
    shutil.copytree(saved, parts / "adapters" / "saved")
    (parts / "adapters" / "saved" / MANIFEST_FILE).write_bytes(
        (rec.save_pretrained(tmp_path / "b") / MANIFEST_FILE).read_bytes()
    )
    assert not Recommender.from_pretrained(parts / "adapters" / "saved").has_hybrid  # it has checksums of its own


@pytest.mark.parametrize(
    "named", ["", ".", "..", "../../../backbone", "../backbone", "/", "~/x", "a/b/c", "us/../x", "-x"]
)
def test_a_backbone_is_inside_or_on_the_hub(parts, named):
    for folder in (parts.parent / "backbone", parts / "adapters" / "backbone", parts / "adapters" / "crime" / "a/b/c"):
        shutil.copytree(parts / "backbone", folder)
    write(parts / "adapters" / "crime" / "adapter_config.json", base_model_name_or_path=named)
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        Recommender.from_pretrained(parts, "crime")


def test_a_link_does_not_lead_a_backbone_outside(parts, rec, tmp_path):
    (parts / "backbone").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="expected a folder of that name"):
        Recommender.from_pretrained(parts, "crime")
    (parts / "backbone").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ValueError, match="got a backbone outside of"):
        Recommender.from_pretrained(parts, "crime")
    saved = rec.save_pretrained(tmp_path / "some" / "saved")
    write(saved / "adapter_config.json", base_model_name_or_path="../../backbone")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "backbone")
    with pytest.raises(ValueError, match="got a backbone outside of"):
        Recommender.from_pretrained(saved)


@pytest.mark.parametrize("domain", ["", ".", "..", "../../x", "/x", "a/b", "a\\b", ".crime", "a\nb", "C:x"])
def test_a_domain_is_the_name_of_a_folder(rec, tmp_path, domain):
    saved = rec.save_pretrained(tmp_path / "saved")
    write(saved / "inference_config.json", domain=domain)
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        find_source(saved)


def test_a_hidden_folder_is_no_domain(copy, parts):
    for folder in (copy, parts):
        shutil.copytree(folder / "adapters" / "crime", folder / "adapters" / ".crime.tmp")
        assert find_source(folder).domains == ["comics", "crime"]
