"""What a party can put together from what it sees, by hand."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))
from toy_recommender import toy_recommender

from fedecider.cross_silo.audit import Sent, another, away_from_run, views_of, without_own
from fedecider.data.domain import Events
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.running.run_folder import RunFolder


def test_silos_that_stand_side_by_side_look_at_each_other():
    assert [another(client, 4) for client in range(4)] == [1, 0, 3, 2]
    assert [another(client, 3) for client in range(3)] == [1, 0, 1]


def test_with_two_clients_a_mean_is_the_other_ones_upload():
    first, second = torch.tensor([[1.0, -2.0]]), torch.tensor([[5.0, 7.0]])
    rest = without_own({"x": (first + second) / 2}, {"x": first}, [{}, {}], 0)
    assert torch.equal(rest["x"], second)


def test_rows_count_those_who_sent_them():
    marks = [
        {"t": torch.tensor([True, True, False])},
        {"t": torch.tensor([True, False, True])},
        {"t": torch.ones(3) > 0},
    ]
    sent = [
        torch.tensor([[2.0], [4.0], [0.0]]),
        torch.tensor([[6.0], [0.0], [1.0]]),
        torch.tensor([[7.0], [8.0], [9.0]]),
    ]
    mean = {"t": torch.tensor([[5.0], [6.0], [5.0]])}
    rest = without_own(mean, {"t": sent[0]}, marks, 0)
    assert rest["t"][:, 0].tolist() == [6.5, 8.0, 5.0]  # the last row is not the observer's: the mean as it is
    alone = without_own({"t": sent[0]}, {"t": sent[0]}, [marks[0], {"t": torch.zeros(3) > 0}], 0)
    assert not alone["t"].any()


def test_of_a_secure_sum_the_server_sees_no_upload(tmp_path):
    recommender = toy_recommender()
    pair = recommender.start
    sent = Sent(1, True, [pair] * 3, [{}] * 3, [{}] * 3, [pair] * 3)

    def parties(secure_sum: bool) -> list[str]:
        settings = SimpleNamespace(run=SimpleNamespace(secure_sum=secure_sum))
        return [view.party for view in views_of(RunFolder(tmp_path), settings, recommender, sent)]

    assert parties(False) == ["nobody", "server", "another client", "another client"]
    assert parties(True) == ["nobody", "another client", "another client"]


def test_silos_of_the_catalogue_that_took_no_part_give_the_others(tmp_path):
    domains = sample_domains(["crime", "comics"])
    silos = {}
    for name, domain in domains.items():
        users, sequences = domain.clients.users, domain.clients.sequences
        for number in (1, 2, 3):
            part = Events(users[number::4], sequences[number::4], None)
            silos[f"{name}.{number}"] = replace(domain, name=f"{name}.{number}", clients=part)
    save_domains(silos, tmp_path)
    taking_part = {name: silos[name] for name in ("crime.1", "crime.2", "comics.1")}
    assert away_from_run(str(tmp_path), "strict", silos["crime.1"], taking_part) == [silos["crime.3"].clients.sequences]
    assert len(away_from_run(str(tmp_path), "strict", silos["comics.1"], taking_part)) == 2
    assert away_from_run("", "strict", silos["crime.1"], taking_part) == []
