"""A table of injected faults: what is expected of each, and what happened; exit code 1 where that differs.

Both tracks, simulated and deployed (server and sites in this process, every message packed and read), on toys of the
tests: three clients and a backbone of a few thousand weights, seven users and fourteen items. In every run that goes on
all numbers of the server, of the honest clients and of the validation must be finite, and every client must be in the
record of every round; further checks are those of `EXPECTED`. Command: python benchmarks/faults.py [--quick]
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedecider.deployment.messages import Channel, DeploymentConfig, Message, pack, unpack
from fedecider.deployment.server import Plan, run_deployed
from fedecider.deployment.site import Site, one_client
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.state import RunState
from fedecider.methods import METHODS
from fedecider.testing.faults import MESSAGE_KINDS, Fault, faulty_channel

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "methods"), str(TESTS / "embedding_fr"), str(TESTS / "deployment")]
users: Any = import_module("toy_federation")
domains: Any = import_module("toy_recommender")
faulty: Any = import_module("faulty_site").faulty

NAMES = ("crime", "comics", "children")
HIT = 1
"""The client that something happens to."""
ROUNDS = 2
MOST = 1 << 20
EXPECTED = {
    "not heard": "refused with a reason; server and honest clients are those of a run where the client was away",
    "no effect": "server and honest clients are those of a run without a fault",
    "bounded": "moves the server by at most ten times as much as the absence of the client",
    "gets through": "moves the result, for nothing tells it from an honest upload; or ends the run with a sentence",
    "stops": "the run ends with a sentence",
    "goes on": "the others train on",
    "not believed": "refused with a reason; the run has the figures of one without a fault but for what was told",
    "resumed": "the final state is that of an uninterrupted run",
}


class Case(NamedTuple):
    """One fault of the client `HIT`."""

    track: str
    place: str
    method: str
    fault: str
    expected: str
    faults: tuple[Fault, ...] = ()
    mean: Any = "mean"
    says: str = ""
    """What the reason, or the sentence that ends the run, must hold."""
    options: tuple[tuple[str, Any], ...] = ()
    damage: Callable[[Message, bytes], bytes] = lambda asked, blob: blob


class Ran(NamedTuple):
    """What a run leaves."""

    state: RunState
    records: Sequence[dict]
    told: Sequence[dict]
    """Refused after the last round."""


def llm_method(name: str, data: Any = None) -> Any:
    return METHODS[name].build(domains.toy_recommender(NAMES, data=data), METHODS[name].config())


def simulated(case: Case, faults: Sequence[Fault], **options: Any) -> Ran:
    if case.track == "LLM":
        plan = faulty_channel(faults)
        method = with_robust_mean(llm_method(case.method), case.mean)
        state, records = domains.run(method, 3, ROUNDS, channel=plan, **options)
    else:
        plan = faulty_channel(faults)
        method = with_robust_mean(users.toy_method(case.method, **dict(case.options)), case.mean)
        state, records = users.run(method, rounds=ROUNDS, channel=plan, **options)
    return Ran(state, records, [])


def deployed(case: Case, faults: Sequence[Fault]) -> Ran:
    """Every party in this process; a site has its own data alone."""
    nothing = {"labels": torch.zeros(0, 2)}
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for client, name in enumerate(NAMES):
            own = [domains.toy_data(name) if other == client else nothing for other in range(3)]
            home = Path(folder) / name
            home.mkdir()
            site = Site(
                method=llm_method(case.method, own),
                hosted=one_client(client),
                run="run",
                folder=home,
                scores=lambda position_U: domains.summarise([position_U])[0],
                finish=lambda state, download: {"row": {"hit@10": {"mean": 0.5}}},
                most_bytes=MOST,
            )
            answers.append(faulty(site.answer, client, faults, 0, MOST))

        def exchange(sent: Any, deadline_s: float) -> dict[int, bytes]:
            found = {client: answers[client](blob) for client, blob in sent.items()}
            return {c: case.damage(unpack(sent[c], MOST), blob) if c == HIT else blob for c, blob in found.items()}

        line, records = Channel(exchange, DeploymentConfig(max_megabytes=1), "run", NAMES), []
        method = with_robust_mean(llm_method(case.method, [nothing] * 3), case.mean)
        settings = RoundSettings(num_rounds=ROUNDS, seed=0)
        state, results = run_deployed(Plan(method, settings, ("ndcg@10",)), line, on_round=records.append)
        assert results.keys() >= {0, 2}, "an honest site's results are lost"
        return Ran(state, records, line.refused)


def resumed(case: Case) -> Ran:
    """Stopped after its last round, with damage to checkpoints, and started again."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder) / "checkpoints"
        simulated(case, [], checkpoints=checkpoints)
        newest = [0, 1] if case.expected == "stops" else [1]
        for number in newest:
            path = sorted(checkpoints.iterdir())[number] / "server.safetensors"
            path.write_bytes(path.read_bytes()[:-3])
        return simulated(case, [], checkpoints=checkpoints, resume=True)


@cache
def reference(track: str, place: str, method: str, mean: Any, options: Any, faults: tuple[Fault, ...]) -> Ran | str:
    """A run with which others are compared, made once."""
    return play(Case(track, place, method, "", "", faults, mean, options=options))


def like(case: Case, faults: tuple[Fault, ...] = (), **other: Any) -> Ran | str:
    """The reference of a case: with these faults alone."""
    place = "deployed" if case.place == "deployed" else "simulated"
    key = {"track": case.track, "place": place, "method": case.method, "mean": case.mean, **other}
    return reference(**key, options=case.options, faults=faults)


def play(case: Case) -> Ran | str:
    """The run, or the sentence that it ended with; every other exception is a defect and comes through."""
    try:
        if case.place == "resumed":
            return resumed(case)
        work = deployed if case.place == "deployed" else simulated
        return work(case, case.faults)
    except ValueError as error:
        return " ".join(str(error).split())


def verdict(case: Case, ran: Ran | str) -> str:
    """What happened, in a few words; ``AssertionError`` where it is not what was expected."""
    if isinstance(ran, str):
        assert case.expected in ("stops", "gets through"), f"ended: {ran}"
        assert re.search(case.says, ran), f"ended with other words: {ran}"
        return f"stopped: {ran}"
    assert case.expected != "stops", "went on"
    _check_finite(case, ran)
    refused = _refused(case, ran)
    plain = like(case)
    assert isinstance(plain, Ran), plain
    if case.expected in ("not heard", "not believed"):
        assert refused, "nothing was refused"
        assert re.search(case.says, refused), f"refused for another reason: {refused}"
    if case.expected == "not heard":
        spans = [Fault(fault.client, "away", fault.first, fault.last) for fault in case.faults]
        away = like(case, tuple(spans or [Fault(HIT, "away", ROUNDS)]), place="simulated")
        assert isinstance(away, Ran), away
        assert _same(case, ran, away), "the others are not as they were without the client"
        return f"refused: {refused}"
    if case.expected == "not believed":
        assert _same(case, ran, plain), "the others are not as they were without the lie"
        return f"refused: {refused}"
    if case.expected in ("no effect", "resumed"):
        assert _same(case, ran, plain), f"an effect: {_distance(ran, plain)}"
        return "the same to the last bit" if _bits(ran, plain) else "the same but for rounding"
    moved = _distance(ran, plain)
    if case.expected == "bounded":
        away = like(case, (Fault(HIT, "away"),), place="simulated")
        assert isinstance(away, Ran), away
        absent = _distance(away, plain)
        assert moved < 10.0 * absent, f"moved by {moved:.3g}, its absence by {absent:.3g}"
        return f"moves the server by {moved:.2g}, its absence by {absent:.2g}"
    assert moved > 0.0, "no effect"
    return f"went on; moves the server by {moved:.2g}"


def _check_finite(case: Case, ran: Ran) -> None:
    number = 3 if case.track == "LLM" else 7
    honest = [client for client in range(number) if client != HIT]
    for name, tensor in ran.state.server.items():
        assert tensor.isfinite().all(), f"{name} of the server is not finite"
    for name, tensor in ran.state.local.items():
        assert tensor[honest].isfinite().all(), f"{name} of an honest client is not finite"
    assert [record["round"] for record in ran.records] == list(range(1, ROUNDS + 1)) or case.place == "resumed"
    for record in ran.records:
        heard = {log["client"] for log in record["clients"]} | {one["client"] for one in record["refused_uploads"]}
        assert heard == set(range(number)), f"round {record['round']} has lost a client"
        assert 0.0 <= record["score"] <= 1.0
        assert all(one["client"] == HIT for one in [*record["refused_uploads"], *record["non_finite_uploads"]])


def _refused(case: Case, ran: Ran) -> str:
    lines = [one["reason"] for record in ran.records for one in record["refused_uploads"]]
    lines += [f"not finite: {', '.join(one['tensors'][:2])}" for r in ran.records for one in r["non_finite_uploads"]]
    return "; ".join(dict.fromkeys([*lines, *(one["reason"] for one in ran.told)]))


def _honest(case: Case, ran: Ran) -> dict[str, torch.Tensor]:
    """What must not have changed: the server, as its clients see it, and the honest clients' own rows."""
    server = dict(ran.state.server)
    if case.method == "fedecider":  # a pair of factors is one product; the attacker's own direction is its own affair
        keep = [0, 2] if case.expected == "no effect" else [0, 1, 2]
        for name in [name for name in server if name.endswith("lora_b")]:
            pair = name.replace("lora_b", "lora_a")
            server[name] = (server[name] @ server.pop(pair))[keep]
    keep = [client for client in range(7 if case.track != "LLM" else 3) if client != HIT]
    loose = case.place == "deployed" or case.fault == "scale"  # rounding of what an honest client starts from
    local = {} if loose else {f"own {k}": tensor[keep] for k, tensor in ran.state.local.items()}
    return {**server, **local}


def _same(case: Case, left: Ran, right: Ran) -> bool:
    one, other = _honest(case, left), _honest(case, right)
    if case.place == "deployed":
        other = {name: tensor for name, tensor in other.items() if name in one}
    close = {"rtol": 1e-3, "atol": 1e-4} if case.method == "fedecider" else {"rtol": 1e-5, "atol": 1e-6}
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], **close) for name in one)


def _bits(left: Ran, right: Ran) -> bool:
    return all(torch.equal(tensor, right.state.server[name]) for name, tensor in left.state.server.items())


def _distance(left: Ran, right: Ran) -> float:
    pairs = [(tensor.double(), right.state.server[name].double()) for name, tensor in left.state.server.items()]
    return sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5


def cases() -> Iterator[Case]:
    """All of them."""
    for method in ("fedecider", "fedavg", "lora_sim", "rolora"):
        yield from _of_uploads("LLM", "simulated", method)
    for method in ("fedecider", "fedavg"):
        yield from _of_uploads("LLM", "deployed", method)
        yield from _of_messages(method)
    for method in ("fedmf", "fedrap", "fedem", "gpfedrec"):
        yield from _of_uploads("embedding", "simulated", method)
    yield from _of_counts()
    for mean in ("mean", "median", "trimmed_mean", "norm_clip"):
        for track, place, method in (
            ("LLM", "simulated", "fedavg"),
            ("LLM", "deployed", "fedavg"),
            ("embedding", "simulated", "fedmf"),
            ("embedding", "simulated", "fedrap"),
        ):
            if mean != "mean" or track == "LLM":  # the plain mean of users has a loose bound
                yield Case(track, place, method, f"scale, {mean}", "bounded", (Fault(HIT, "scale"),), mean)
    for track, method in (("LLM", "fedecider"), ("embedding", "fedmf")):
        yield Case(track, "resumed", method, "the newest checkpoint is cut off", "resumed")
        yield Case(track, "resumed", method, "both checkpoints are cut off", "stops", says="No checkpoint of this run")


def _of_uploads(track: str, place: str, method: str) -> Iterator[Case]:
    def case(kind: Any, expected: str, says: str = "", first: int = 1, last: int | None = None, factor: float = 1e6):
        return Case(track, place, method, kind, expected, (Fault(HIT, kind, first, last, factor),), says=says)

    yield case("away", "goes on" if place == "simulated" else "not heard", "away", first=2)
    yield case("late", "not heard", r"came after round \d was closed")
    yield case("nan", "not heard", "not finite")
    takes_names = method == "rolora"  # sends one factor, then the other
    yield case("replay", "not heard" if takes_names else "gets through", "which is not what" * takes_names, first=2)
    yield case("sign_flip", "gets through")
    yield case("random", "gets through")
    yield case(
        "scale", "no effect" if method == "fedecider" else "gets through", last=1 if method == "fedecider" else None
    )
    uniform = track == "LLM" or method in ("fedrap", "gpfedrec")
    yield case("weight", "no effect" if uniform else "gets through", factor=100.0)


def _of_messages(method: str) -> Iterator[Case]:
    says = {
        "wrong_shape": r"got torch\.\w+ \(1, ",
        "wrong_dtype": "torch.float64",
        "missing": "and none for",
        "extra": r"nobody asked for \['extra'\]",
        "wrong_round": "for round 1, expected the upload",
        "wrong_client": "got 'upload' of client 2",
        "oversized": "expected at most 1,048,576",
        "cut_off": "no message",
        "garbage": "no message",
    }
    for kind in MESSAGE_KINDS:
        yield Case("LLM", "deployed", method, kind, "not heard", (Fault(HIT, kind, 2),), says=says[kind])

    def lie(kind: str, change: Callable[[Message], Message]) -> Callable[[Message, bytes], bytes]:
        def damage(asked: Message, blob: bytes) -> bytes:
            return pack(change(unpack(blob, MOST))) if (asked.kind, asked.round) == (kind, ROUNDS) else blob

        return damage

    def facts(**values: Any) -> Callable[[Message], Message]:
        return lambda one: one._replace(facts={**one.facts, **values})

    uploads = {
        "a weight of 1e308": (facts(weights=[1e308]), "got the weight"),
        "marks that are a number": (facts(marks={"x": 3}), "got marks of x of shape"),
        "scores instead of an upload": (lambda one: one._replace(kind="scores"), "got 'scores'"),
        "an error of ten thousand letters": (
            lambda one: Message("error", 2, {}, {"reason": "x" * 10_000}),
            "the site says",
        ),
    }
    for what, (change, reason) in uploads.items():
        yield Case("LLM", "deployed", method, what, "not heard", says=reason, damage=lie("train", change))
    scores = {
        "scores above 1": facts(scores={"global": {"ndcg@10": 2.0}, "fused": {"ndcg@10": 2.0}}),
        "scores that are a list": facts(scores=[1]),
        "scores of a list": facts(scores={"global": [1], "fused": [1]}),
    }
    for what, change in scores.items():
        says_scores = "expected numbers from 0 to 1"
        yield Case("LLM", "deployed", method, what, "not believed", says=says_scores, damage=lie("validate", change))
    results = {
        "results of 400 digits": facts(results={"row": {"hit@10": {"mean": 10**400}}}),
        "results without a mean": facts(results={"row": {"hit@10": {}}}),
    }
    for what, change in results.items():
        yield Case("LLM", "deployed", method, what, "not believed", says="got no figures", damage=lie("finish", change))


def _of_counts() -> Iterator[Case]:
    """Methods whose clients send lists of items, or masked sums of them."""
    for method in ("fedease", "fednear"):
        for kind, expected, says in (
            ("away", "goes on", ""),
            ("late", "not heard", "came after"),
            ("random", "gets through" if method == "fedease" else "no effect", ""),  # its one item has one order
            ("nan", "stops", "who sends whole numbers"),
            ("replay", "no effect", ""),
        ):
            yield Case("embedding", "simulated", method, kind, expected, (Fault(HIT, kind),), says=says)  # type: ignore
        secure = (("secure", True),)
        for kind in ("away", "late"):
            says = "came after" if kind == "late" else ""
            expected, fault = "not heard" if kind == "late" else "goes on", (Fault(HIT, kind),)  # type: ignore
            yield Case("embedding", "simulated", method, f"{kind}, masked", expected, fault, says=says, options=secure)  # type: ignore
            many = tuple(Fault(client, kind) for client in range(3))  # type: ignore
            says = "uploads for the secure sum of"
            yield Case("embedding", "simulated", method, f"{kind}, masked, 3", "stops", many, says=says, options=secure)


def quick() -> list[Case]:
    """One case of every place and expectation, the cheapest track first: what the tests run."""
    found: dict[tuple[str, str], Case] = {}
    for case in sorted(cases(), key=lambda case: case.track != "embedding"):
        found.setdefault((case.place, case.expected), case)
    return list(found.values())


def run_all(chosen: Sequence[Case], log: Callable[[str], None]) -> int:
    """Plays all of them; the number of those that did what was not expected."""
    failed = 0
    log("| track | where | method | fault | expected | outcome |\n|---|---|---|---|---|---|")
    for case in chosen:
        try:
            outcome = verdict(case, play(case))
        except AssertionError as error:
            failed, outcome = failed + 1, f"**NOT AS EXPECTED**: {error}"
        short = outcome.replace("|", "/").replace("\n", " ")[:160]
        log(f"| {case.track} | {case.place} | {case.method} | {case.fault} | {case.expected} | {short} |")
    counted = Counter(case.expected for case in chosen)
    log(f"\n{len(chosen)} faults, {failed} not as expected; " + ", ".join(f"{n} {e}" for e, n in counted.items()))
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    return int(run_all(quick() if "--quick" in words else list(cases()), lambda text: print(text, flush=True)) > 0)


if __name__ == "__main__":
    sys.exit(main())
