"""The whole federation again from the last adapters: next month's data, on the stages and the catalogue of before."""

import dataclasses
import json
import shutil

import pytest
import torch

from fedecider.cli.main import main
from fedecider.cross_silo.continued import going_on, on_catalogue
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Events
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.federation.method import Download, FederatedMethod
from fedecider.federation.state import RunState
from fedecider.models.item_table import read_item_ids
from fedecider.running.run_folder import read_run

pytestmark = pytest.mark.whole
NAMES = ("crime", "comics")


def next_month(domain):
    """Everybody has one event more, half of them of an item that is new and stands before all others."""
    users, sequences, times = domain.clients
    keys = ["0-new", *domain.item_keys]
    later = [
        [*(item + 1 for item in items), 0 if number % 2 else 1 + number % 50] for number, items in enumerate(sequences)
    ]
    clients = Events(users, later, [[*at, max(at) + 9] for at in times])
    public = domain.public._replace(sequences=[[item + 1 for item in items] for items in domain.public.sequences])
    return dataclasses.replace(
        domain,
        catalogue=Catalogue(domain.name, keys, ["New", *domain.titles], ["title: new thing", *domain.item_texts]),
        clients=clients,
        public=public,
    )


def test_a_month_stands_on_the_catalogue_of_before():
    domain = sample_domains(["crime"], 0)["crime"]
    found = on_catalogue(next_month(domain), domain)
    assert found.item_keys == domain.item_keys
    for number in (0, 1):
        old, new = list(domain.clients.sequences[number]), list(found.clients.sequences[number])
        assert new == ([*old, number % 50] if number == 0 else old), "an item without an ID is left out"
        assert len(found.clients.timestamps[number]) == len(new)
    assert list(found.public.sequences) == [list(items) for items in domain.public.sequences]
    assert found.card["clients"]["events"] == domain.clients.num_events + (len(domain.clients.users) + 1) // 2


KEPT = ("local.score", "local.round", "local.trained")


def test_rounds_go_on_behind_the_reported_one():
    seen = []
    method = FederatedMethod(
        "m",
        lambda: ({"w": torch.zeros(2)}, {"own": torch.zeros(3), **dict.fromkeys(KEPT, torch.zeros(3))}),
        lambda round, server, clients: seen.append(round) or Download(server),
        lambda round, *_: seen.append(round),
        lambda round, server, uploads: seen.append(round),
        None,
        ("v",),
        upload_like=lambda round, server: seen.append(round),
    )
    ones, scores = torch.ones(3), torch.full((3,), 0.5)
    last = {"own": 2 * ones, **dict.fromkeys(KEPT, scores)}
    state = RunState(
        4, {"w": torch.ones(2) * 2}, last, 3, 0.5, {"w": torch.ones(2)}, {"own": ones, **dict.fromkeys(KEPT, ones)}
    )
    later = going_on(method, state)
    server, local = later.init()
    assert server["w"].tolist() == [1, 1]
    assert local["own"].tolist() == [1, 1, 1], "the reported round, not the last one"
    assert local["local.score"].tolist() == [-1, -1, -1]
    later.broadcast(1, server, torch.tensor([0]))
    later.client_update(2, None, None, None)
    later.server_aggregate(3, server, [])
    later.upload_like(4, server)
    assert seen == [5, 6, 7, 8]
    with pytest.raises(ValueError, match="got a state whose w is not that of m here"):
        going_on(method, state._replace(best_server={"w": torch.ones(3)})).init()


@pytest.fixture(scope="module")
def world(two_clients_run, tmp_path_factory):
    """The folder of the run of two clients, with next month's data in it."""
    folder = shutil.copytree(two_clients_run, tmp_path_factory.mktemp("start") / "world")
    save_domains({name: next_month(one) for name, one in sample_domains(NAMES, 0).items()}, folder / "month")
    return folder


def test_the_whole_federation_again(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    words = ["federate", "--start_from", "runs/whole", "--data", "month"]
    assert main([*words, "--output", "runs/month", "--num_rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "events left out, of items that the earlier run does not have" in said
    before, after = (read_item_ids(world / "runs" / one / "adapters" / "crime") for one in ("whole", "month"))
    assert before == after
    record = read_run(world / "runs" / "month")
    assert record["config"]["run"]["lora_rank"] == 2, "the settings of the run that it starts from"
    first, second = (json.loads((world / "runs" / one / "rounds.jsonl").read_text()) for one in ("whole", "month"))
    assert first["round"] == second["round"] == 1
    losses = [[one["first_loss"] for one in record["clients"]] for record in (first, second)]
    assert losses[0] != losses[1], "from trained adapters, not from the start"
    assert main(["evaluate", "--run", "runs/month"]) == 0
    for command in ("audit", "without"):
        assert main([command, "--run", "runs/month"]) == 2
        assert "got runs/month, which started from the adapters of runs/whole" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["audit", "--run", "runs/month"]) == 2
    assert "Audit the run that it started from" in capsys.readouterr().err
    for wrong, message in {
        ("--lora_rank", "4"): "with other settings (lora_rank: got 4, expected 2), expected those of that run",
        ("--domains", "crime"): "with other settings (domains: got 'crime', expected 'crime,comics')",
    }.items():
        assert main([*words, "--output", "runs/wrong", *wrong]) == 2
        assert message in capsys.readouterr().err
    shutil.rmtree(world / "runs" / "whole" / "checkpoints")
    assert main([*words, "--output", "runs/wrong"]) == 2
    assert "without its last checkpoint" in capsys.readouterr().err
    assert not (world / "runs" / "wrong").exists()
