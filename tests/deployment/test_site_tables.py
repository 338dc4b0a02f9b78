"""From tables to a deployment: one party publishes the catalogue, each company prepares its own users."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from test_project import CPU, deploy_playground, federate, project_of, toy_settings

from fedecider.cli.deploy import main
from fedecider.cli.main import main as command
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains, save_domains
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


def test_a_sites_table_is_read_as_import_reads_it(shops, tmp_path, capsys, monkeypatch):
    """With the options of import, and its sentence about rows that are none."""
    monkeypatch.chdir(shops)
    rows = pd.read_parquet("north.parquet").assign(state="paid")
    rows["at"] = pd.to_datetime(rows["at"], unit="s").dt.strftime("%d.%m.%Y %H:%M:%S")
    user, item, time, _ = rows.iloc[0]
    odd = f"{user};{item};{time};returned\n{user};{item};yesterday;paid\n"
    orders, own = tmp_path / "orders.txt", tmp_path / "own"
    text = rows.to_csv(sep=";", index=False, header=False) + odd
    orders.write_bytes(text.encode("utf-16-le"))
    form = ("--header", "customer,sku,at,state", "--delimiter", ";", "--encoding", "utf-16-le", "--keep", "state=paid")
    form += ("--time_format", "%d.%m.%Y %H:%M:%S", "--quoting", "false", *COLUMNS)
    words = ["prepare", "--project", "project", "--client", "shop.north", "--events", str(orders), *form]
    assert main([*words, "--output", str(own)]) == 2
    refused = capsys.readouterr().err
    assert "got 1 bad rows, the first one: got the time 'yesterday' in row" in refused
    assert not own.exists()
    things = tmp_path / "things.txt"
    things.write_bytes(pd.read_csv("products.csv").to_csv(sep=";", index=False).encode("utf-16-le"))
    words_of_import = ("--items", str(things), "--texts", "title=label", "--output", str(own))
    assert command(["import", str(orders), *form, *words_of_import]) == 2
    assert capsys.readouterr().err == refused
    assert main([*words, "--bad_rows", "skip", "--output", str(own)]) == 0
    assert "events: 1 bad rows: " in capsys.readouterr().out
    assert load_domains(own)["shop.north"].clients == load_domains("prepared")["shop.north"].clients


def test_a_catalogue_is_read_as_import_reads_it(shops, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(shops)
    table = pd.read_csv("products.csv").rename(columns={"sku": "Nummer"})
    text = table.to_csv(sep="|", index=False, header=False) + "|no key|nothing\n"
    (tmp_path / "things.txt").write_bytes(text.encode("utf-16-le"))
    form = ("--items_header", "Nummer,label,blurb", "--delimiter", "|", "--encoding", "utf-16-le")
    form += ("--items_key", "Nummer", "--texts", "title=label,description=blurb", "--output", str(tmp_path / "public"))
    words = ["publish", "--items", str(tmp_path / "things.txt"), "--companies", "north,south", *form]
    assert main(words) == 2
    assert "got 1 bad rows, the first one: " in capsys.readouterr().err
    assert not (tmp_path / "public").exists()
    assert main([*words, "--bad_rows", "skip"]) == 0
    assert "items: 1 bad rows: " in capsys.readouterr().out
    found, plain = (load_domains(folder)["shop.south"] for folder in (tmp_path / "public", "public"))
    assert (found.own_keys, found.titles, found.item_texts) == (plain.own_keys, plain.titles, plain.item_texts)


def write_tables(folder, whole):
    """Two companies with half of their items in common under other keys, a form of table and a mapping each."""
    sold = {"north": range(40), "south": range(20, 60)}
    for number, (name, items) in enumerate(sold.items()):
        users = slice(100 * number, 100 * number + 100)
        rows = table(whole.clients, [str(item) for item in range(299)], users)
        rows = rows[rows.sku.astype(int) % 60 >= items.start].assign(sku=lambda rows: rows.sku.astype(int) % 60)
        rows = rows[rows.sku < items.stop]
        rows["title"] = [f"Café no {whole.titles[item]} {7 * item + 3}" for item in rows.sku]
        if name == "north":
            rows["sku"] = rows.sku.map("N-{:03}".format)
            rows["when"] = pd.to_datetime(rows["at"], unit="s").dt.strftime("%d.%m.%Y %H:%M:%S")
            rows["basket"] = rows.customer + "-" + (rows["at"] // 90_000).astype(str)
            renamed = rows.rename(
                columns={"customer": "Kunde", "sku": "Artikel", "title": "Bezeichnung", "when": "Beleg"}
            )
            columns = ["Kunde", "Artikel", "Bezeichnung", "Beleg", "basket"]
            text = renamed[columns].to_csv(sep=";", index=False) + "k;N-001;Bad row;heute;x\n"
            (folder / "north.csv").write_bytes(text.encode("latin-1"))
            mapping = {"user": "Kunde", "item": "Artikel", "time": "Beleg", "time_format": "%d.%m.%Y %H:%M:%S"}
            mapping |= {"order": "basket", "texts": {"title": "Bezeichnung"}, "encoding": "latin-1", "delimiter": ";"}
        else:
            rows["sku"] = 500 + rows.sku
            rows["ms"] = rows["at"] * 1000
            rows[["customer", "sku", "title", "ms"]].to_parquet(folder / "south.parquet")
            mapping = {"user": "customer", "item": "sku", "time": "ms", "texts": {"title": "title"}}
        file = "north.csv" if name == "north" else "south.parquet"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"events": file, **mapping}))


def test_a_deployment_of_own_tables_of_which_half_the_items_are_common_is_the_pilot_to_the_digit(tmp_path, monkeypatch):
    """The commands of docs/deploy.md: what leaves a company before the rounds has no customer in it."""
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path, sample_domains(["crime"])["crime"])
    for name in ("north", "south"):
        assert command(["import", f"{name}.yaml", "--bad_rows", "skip", "--output", name]) == 0
        assert main(["publish", "--data", name, "--output", f"{name}-items"]) == 0
        (domain,) = load_domains(f"{name}-items").values()
        assert not domain.clients.users
    assert command(["match", "north", "south", "--output", "pilot.csv"]) == 0
    assert command(["match", "north-items", "south-items", "--output", "pairs.csv"]) == 0
    assert Path("pairs.csv").read_text() == Path("pilot.csv").read_text(), "customers are not needed"
    assert command(["match", "north", "south", "--pairs", "pilot.csv", "--output", "matched"]) == 0
    assert command(["match", "north-items", "south-items", "--pairs", "pairs.csv", "--output", "public"]) == 0
    settings = toy_settings(("north", "south"), method="fedavg", ensemble={"kind": "logit"}, protocol="next_basket")
    Path("toy.yaml").write_text(settings)
    federate("--config", "toy.yaml", "--data", "matched", "--output", "runs/pilot", "--cache", "cache")
    project_of(tmp_path / "project", "--config", "toy.yaml")
    for name in ("north", "south"):
        words = ("--project", "project", "--client", name, "--data", name)
        assert main(["prepare", *words, "--output", f"site-{name}"]) == 0
        pilot, site = load_domains("matched")[name], load_domains(f"site-{name}")[name]
        assert site.clients == pilot.clients
        assert site.own_keys == pilot.own_keys
    north, south = ({*domain.item_keys} for domain in load_domains("matched").values())
    assert 0.4 < len(north & south) / len(north) < 0.6
    deploy_playground(tmp_path)
    simulated = json.loads(Path("runs/pilot/metrics.json").read_text())
    for name in ("north", "south"):
        deployed = json.loads(Path("out", name, "metrics.json").read_text())
        assert deployed["domains"][name]["test"] == simulated["domains"][name]["test"]
        assert deployed["ensemble"] == {name: simulated["ensemble"][name]}


def test_only_the_companys_own_data_are_prepared(shops, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(shops)
    other = sample_domains(["comics"])
    save_domains(other, tmp_path / "other")
    words = ["prepare", "--project", "project", "--client", "shop.north", "--output", str(tmp_path / "own")]
    assert main([*words, "--data", str(tmp_path / "other")]) == 2
    assert "items that shop.north of the project does not have, such as comics-0000" in capsys.readouterr().err
    assert main([*words, "--data", "prepared", "--events", "north.parquet"]) == 2
    assert "got neither or both of --data and --events" in capsys.readouterr().err
    assert main(["publish", "--output", str(tmp_path / "own")]) == 2
    assert "got neither or both of --data and --items" in capsys.readouterr().err
    assert not (tmp_path / "own").exists()
