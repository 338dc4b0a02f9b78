"""From tables to a deployment: one party publishes the catalogue, each company prepares its own users."""

import json

import pandas as pd
import pytest
from test_project import CPU, federate, project_of, toy_settings

from fedecider.cli.deploy import main
from fedecider.data.sample import sample_domains
from fedecider.deployment.llm import own_domain, party
from fedecider.deployment.project import read_project

pytestmark = pytest.mark.whole

COLUMNS = ("--user", "customer", "--item", "sku", "--time", "at")
NAMES = ("shop.north", "shop.south")


def table(events, keys, users):
    rows = [
        (user, keys[item], time)
        for user, items, times in list(zip(*events, strict=True))[users]
        for item, time in zip(items, times, strict=True)
    ]
    return pd.DataFrame(rows, columns=["customer", "sku", "at"])


@pytest.fixture(scope="module")
def shops(tmp_path_factory):
    """Published, made a project, prepared: each by its command."""
    folder, whole = tmp_path_factory.mktemp("shops"), sample_domains(["crime"])["crime"]
    keys = whole.item_keys
    table(whole.public, keys, slice(20)).to_csv(folder / "disclosed.csv", index=False)
    table(whole.clients, keys, slice(0, 30)).to_parquet(folder / "north.parquet")
    table(whole.clients, keys, slice(30, 50)).to_parquet(folder / "south.parquet")
    things = pd.DataFrame({"sku": keys, "label": whole.titles, "blurb": whole.item_texts})
    things.to_csv(folder / "products.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        texts = ("--texts", "title=label,description=blurb")
        words = ("--events", "disclosed.csv", "--items", "products.csv", "--companies", "north,south", *texts)
        assert main(["publish", *words, *COLUMNS, "--output", "public"]) == 0
        (folder / "toy.yaml").write_text(toy_settings(NAMES))
        project_of(folder / "project", "--config", "toy.yaml")
        for name in NAMES:
            words = ("--project", "project", "--client", name, "--events", f"{name.partition('.')[2]}.parquet")
            assert main(["prepare", *words, *COLUMNS, "--output", "prepared"]) == 0
    return folder


def test_what_sites_prepare_is_what_the_project_expects(shops):
    project = read_project(shops / "project")
    assert project.names == list(NAMES)
    for name, num_users in zip(NAMES, (30, 20), strict=True):
        own = own_domain(project, str(shops / "prepared"), name)
        assert len(own.clients.users) == num_users
        ready = party(project, {name: own}, CPU)
        assert list(ready.artifacts.domains) == [name]
        assert len(ready.artifacts.ids[name].items.texts) == 299  # bought by a public user or not


def test_they_train_together(shops, monkeypatch):
    monkeypatch.chdir(shops)
    federate("--config", "toy.yaml", "--data", "prepared", "--output", "runs/shops", "--num_rounds", "1")
    metrics = json.loads((shops / "runs" / "shops" / "metrics.json").read_text())
    assert list(metrics["domains"]) == list(NAMES)


def test_a_site_cannot_take_another_catalogue(shops, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(shops)
    other = pd.read_parquet("north.parquet").assign(sku=lambda rows: "x" + rows.sku)
    other.to_parquet(tmp_path / "other.parquet")
    words = ("--project", "project", "--client", "shop.north", "--events", str(tmp_path / "other.parquet"))
    assert main(["prepare", *words, *COLUMNS, "--output", str(tmp_path / "own")]) == 2
    assert "got 0 users of shop.north" in capsys.readouterr().err
    assert not (tmp_path / "own").exists()
