"""Baselines of one's own: what they see, their rows, and what is refused before a run begins."""

import json
from importlib.metadata import entry_points

import pytest
import torch
from outside import look_again, write_package
from small_runs import decoder_settings

import fedecider as fd
from fedecider.baselines.counts import POPULARITY, popularity
from fedecider.baselines.own import check_own, lent, own_baselines, own_positions
from fedecider.comparison.compare import Shared
from fedecider.cross_silo.comparison import CompareConfig
from fedecider.cross_silo.sasrec_entries import own_baseline
from fedecider.data.sample import sample_domains
from fedecider.evaluation.protocols import STRICT, get_protocol

pytestmark = pytest.mark.whole

SETTINGS = {**decoder_settings(), "domains": "crime,comics", "num_rounds": 1}


def bestsellers(data):
    """Built-in popularity, written as anybody would."""
    count_I = torch.zeros(len(data.item_keys))
    for sequence in data.sequences:
        for item in sequence:
            count_I[item] += 1
    return lambda histories: count_I.expand(len(histories), -1)


def newest_first(data):
    """The newest item of a history in front: what a list without seen items never shows."""

    def score(histories):
        return [[float(item == history[-1]) for item in range(len(data.item_keys))] for history in histories]

    return score


@pytest.fixture(scope="module")
def domain():
    return sample_domains(["crime"])["crime"]


def test_bestsellers_have_the_places_of_popularity(domain):
    with lent({"bestsellers": bestsellers}):
        found = own_positions(domain, ("valid", "test"), STRICT)
    for split, rows in found.items():
        expected = popularity(domain.clients.sequences, len(domain.item_keys), split, extra=domain.public.sequences)
        assert torch.equal(rows["bestsellers"], expected)
    assert not torch.equal(found["valid"]["bestsellers"], found["test"]["bestsellers"])
    assert own_baselines() == {}


def test_nothing_that_is_held_out_is_in_reach(domain):
    seen = []

    def watching(data):
        seen.append([list(one) for one in data.sequences])

        def score(histories):
            seen.append(histories)
            return torch.zeros(len(histories), len(data.item_keys))

        return score

    with lent({"watching": watching}):
        own_positions(domain, ("valid", "test"), STRICT)
    whole = [list(one) for one in domain.clients.sequences]
    public = [list(one) for one in domain.public.sequences]
    assert seen[0] == [one[:-2] for one in whole] + public
    asked = [one for batch in seen[1:] for one in batch]
    assert asked == [one[:-2] for one in whole] + [one[:-1] for one in whole]


def test_candidates_are_those_of_the_protocol(domain):
    """Every score but that of the newest item is equal, and that item is no candidate where seen ones are dropped."""
    with lent({"newest": newest_first}):
        dropped = own_positions(domain, ("test",), STRICT)["test"]["newest"]
        kept = own_positions(domain, ("test",), get_protocol("strict/keep_seen"))["test"]["newest"]
    num_items = len(domain.item_keys)
    first = next(user for user, one in enumerate(domain.clients.sequences) if one[-1] not in list(one[:-1]))
    history = list(domain.clients.sequences[first])[:-1]
    assert float(dropped[first]) == (num_items - len(set(history)) - 1) / 2
    assert float(kept[first]) == 1 + (num_items - 2) / 2


@pytest.mark.parametrize(
    ("label", "rule", "words"),
    [
        (POPULARITY, bestsellers, "popularity', which a row of ours has"),
        ("a|b", bestsellers, r"'a\|b', which cannot be the label of a row"),
        ("wrong", lambda data: 7, "got 7 from the baseline wrong, expected a function from histories"),
        ("wrong", lambda data: data.prices, "AttributeError: .*expected a function of fedecider.baselines.own"),
        ("wrong", lambda data: lambda histories: [[1.0]], r"got \(1, 1\) from the baseline wrong, expected \(2, \d+\)"),
        ("wrong", lambda data: lambda histories: bestsellers(data)(histories) / 0, "numbers that are not finite"),
        ("wrong", lambda data: lambda histories: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(domain, label, rule, words):
    with lent({label: rule}), pytest.raises(ValueError, match=words):
        check_own({"crime": domain}, [POPULARITY])


def test_a_run_has_the_row_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fd.federate(method="fedavg", config=dict(SETTINGS), output="run", baselines={"our rule": bestsellers})
    assert result.table.loc["our rule"].equals(result.table.loc["popularity"].rename("our rule"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["baselines"] == ["our rule"]
    assert any("our rule" in (one["first"], one["second"]) for one in metrics["comparisons"])
    assert {"our rule"} < set(result.per_user["variant"])
    assert "our rule" in (tmp_path / "run" / "results.md").read_text()
    assert "our rule" in result.report().read_text()
    with pytest.raises(ValueError, match="got an error from the baseline our rule"):
        fd.federate(config=dict(SETTINGS), output="late", baselines={"our rule": lambda data: 1 / 0})
    assert not (tmp_path / "late").exists()
    with pytest.raises(ValueError, match="got baselines with fedmf, a method of the cross-device track"):
        fd.federate(method="fedmf", baselines={"our rule": bestsellers})


def test_the_best_of_all_simple_rules_is_what_the_verdict_compares_with(tmp_path, monkeypatch):
    """A rule that cheats by the sample's own order is the hardest one to beat, and is named."""
    monkeypatch.chdir(tmp_path)
    domains = sample_domains(["crime", "comics"])

    def oracle(data):
        sequences = [list(one) for one in domains[data.name].clients.sequences]
        following = {tuple(one[:-cut]): one[-cut] for one in sequences for cut in (1, 2)}

        def score(histories):
            return torch.nn.functional.one_hot(
                torch.tensor([following[tuple(one)] for one in histories]), len(data.item_keys)
            )

        return score

    result = fd.federate(method="fedavg", config=dict(SETTINGS), output="run", baselines={"the oracle": oracle})
    assert result.table.loc["the oracle", "hit@10"] > 0.9
    assert "the oracle" in result.verdict


def test_an_installed_one_is_found_and_stands_in_tables(domain, tmp_path, monkeypatch):
    module = (
        "def rule(data):\n    return lambda histories: [[float(i) for i in range(len(data.titles))]] * len(histories)"
    )
    write_package(tmp_path, "shop-rules", module, baselines={"shop rule": "shop_rules:rule"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [one.name for one in entry_points(group="fedecider.baselines")] == ["shop rule"]
    found = own_positions(domain, ("test",), STRICT)["test"]["shop rule"]
    last = len(domain.item_keys) - 1
    before = [
        sum(later not in one[:-1] for later in range(one[-1] + 1, last + 1))
        for one in map(list, domain.clients.sequences)
    ]
    fresh = [user for user, one in enumerate(map(list, domain.clients.sequences)) if one[-1] not in one[:-1]]
    assert found[fresh].tolist() == [before[user] for user in fresh]
    config = CompareConfig(rows={"fedavg": {}}, seeds=1)
    assert config.baselines[-1] == "shop rule"
    cell = own_baseline(Shared({"crime": domain}, "strict", 1, tmp_path, "cpu"), "shop rule").run({}, 0)
    assert torch.equal(cell.positions()["strict"]["shop rule"]["crime"], found)
    taken = pytest.raises(ValueError, match="got the baseline shop rule, which an installed package has too")
    with taken, lent({"shop rule": bestsellers}):
        pass
    (tmp_path / "shop_rules.py").write_text("import nothing_of_that_name")
    look_again(tmp_path)
    with pytest.raises(ValueError, match=r"the baseline shop rule of shop-rules 1.0 \(ModuleNotFoundError"):
        check_own({"crime": domain}, [])
