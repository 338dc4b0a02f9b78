"""Settings for people's own data, chosen from the data and the machine where nobody chose any.

The start is a configuration of ours that was measured in the same situation; rules change what the data or the machine
ask to be changed, each for a reason that is said. What is chosen is an ordinary configuration.

Shape legend of the estimate: D width, F width of feed-forward layers, I items of a catalogue, V items of all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from fedecider.cross_silo.settings import RunConfig
from fedecider.data.domain import Domain, clients_of
from fedecider.data.encoders import chosen_encoder
from fedecider.data.sellers import by_catalogue
from fedecider.data.store import load_domains
from fedecider.methods.config import LocalTraining
from fedecider.running.machine import available_bytes
from fedecider.running.options import merged, typed
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, check_new
from fedecider.running.settings_files import load_yaml
from idgen.precision import PAYS, bf16_speedup, in_words
from idgen.ranking_config import RankingConfig

COMPANIES = Path("configs/companies.yaml")
DOMAINS = Path("configs/domains.yaml")
TINY = Path("configs/demo_causal.yaml")
NUM_TINY = 5_000
"""Events; the embedded sample, which `TINY` is for, has 3,500, and `DOMAINS` was measured from 12,000 on."""
NUM_DENSE = 20
"""Events a user from which layers may have to learn too. Measured were seven and a hundred (docs/backbones.md): between
them, a history that fills the model's own (samples.max_history 20)."""
WIDTHS = {"minilm": 256, "tfidf": 128}
"""Wider was better up to 256 (docs/backbones.md); vectors of TF-IDF have 128 numbers at most."""
LONG_S = 3600.0
"""What takes longer is not begun unasked."""
UNEQUAL = 4.0
"""Times the events of the smallest client from which the largest one would gain nothing from equal weights; measured
is 33 times."""
FACTOR = 2.0
"""Within which the estimate was in the runs of benchmarks/results/chosen.md."""
PLACES = ("output", "cache", "resume", "tracker")
"""Options that say where things are, and are no part of a configuration."""


class DataFacts(NamedTuple):
    """What is counted in prepared domains."""

    names: tuple[str, ...]
    """Of the clients."""
    num_catalogues: int
    num_users: int
    """Of all clients, as are the events."""
    num_events: int
    events_per_user: float
    """The median."""
    num_items: int
    """Of the largest catalogue."""
    num_all_items: int
    num_texts: int
    """Different texts of items that have words, of all catalogues."""
    num_public: int
    """Users."""
    has_parts: bool = False
    """Whether clients of one catalogue sell parts of it."""
    spread: float = 1.0
    """Events of the largest client over those of the smallest one."""

    @property
    def is_shared(self) -> bool:
        """Whether any two clients have one catalogue."""
        return self.num_catalogues < len(self.names)

    @property
    def is_dense(self) -> bool:
        return self.events_per_user >= NUM_DENSE

    @property
    def is_tiny(self) -> bool:
        return self.num_events < NUM_TINY


class Machine(NamedTuple):
    """What the machine has."""

    cores: int
    memory_gb: float
    """That is free."""
    gpu: str
    """Its name; empty where there is none."""
    gpu_gb: float
    encoder: str
    """Of item texts: minilm or tfidf."""
    bf16_speedup: float
    """How many times as fast products are in bf16 as in fp32."""
    flops: float
    """Floating-point operations a second of a product as training has them, on `num_threads` threads."""


class Estimate(NamedTuple):
    """Seconds where nothing else runs."""

    expected: float
    low: float
    high: float


class Choice(NamedTuple):
    """What is chosen, why, and what it will take."""

    settings: dict[str, Any]
    """As a YAML configuration has them, with what was asked for."""
    reasons: list[str]
    """A line for each choice."""
    seconds: Estimate
    gigabytes: float


def facts_of(domains: Mapping[str, Domain]) -> DataFacts:
    """Counts of prepared domains, those of a foreign pool among them."""
    clients, sellers = clients_of(domains), by_catalogue(domains).values()
    lengths = [length for domain in clients.values() for length in domain.clients.arrays().sequences.length_U.tolist()]
    sizes = [domain.clients.num_events for domain in clients.values()]
    num_items = [len(one.catalogue.keys) for one in sellers]
    texts = {text for one in sellers for text in one.catalogue.texts if any(map(str.isalpha, text))}
    return DataFacts(
        names=tuple(clients),
        num_catalogues=len({domain.catalogue for domain in clients.values()}),
        num_users=len(lengths),
        num_events=sum(lengths),
        events_per_user=float(median(lengths)) if lengths else 0.0,
        num_items=max(num_items),
        num_all_items=sum(num_items),
        num_texts=len(texts),
        num_public=len({user for domain in domains.values() for user in domain.public.users}),
        spread=max(sizes) / min(sizes) if sizes else 1.0,
        has_parts=any(domain.is_part for domain in clients.values()),
    )


def this_machine() -> Machine:
    """What this process finds; a quarter of a second of products is timed."""
    cores, device = os.cpu_count() or 1, "cuda" if torch.cuda.is_available() else "cpu"
    properties = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return Machine(
        cores,
        available_bytes() / 1e9,
        properties.name if properties else "",
        properties.total_memory / 1e9 if properties else 0.0,
        chosen_encoder("auto"),
        bf16_speedup(device),
        _measured_flops(device, num_threads(cores)),
    )


def num_threads(cores: int) -> int:
    """Threads of a process."""
    return 1 if cores < 8 else 4


def choose(facts: DataFacts, machine: Machine, asked: Mapping[str, Any] = {}) -> Choice:
    """Settings for these data on this machine; what is ``asked`` for, by option, stays as it is.

    Raises:
        ValueError: there is no client.
    """
    if not facts.names:
        raise ValueError("got data without client users, expected some: nobody would be trained for")
    if (reader := _asked(asked, "pretrain.text_encoder") or "auto") != "auto":
        machine = machine._replace(encoder="tfidf" if reader == "tfidf" else "minilm")
    base, why = _base(facts)
    found = {"domains": ",".join(facts.names), **deepcopy(dict(load_yaml(base)))}
    found |= {"domains": ",".join(facts.names), "method": _method(facts)[0], "teacher_row": False}
    found.pop("data", None)
    for block in (found, found["pretrain"]):  # MiniLM reads own texts, wherever it is installed
        block.pop("encoder", None)
        block.pop("text_encoder", None)
    reasons = {"method": _method(facts)[1]}
    reasons |= _weights(facts, found, asked)
    reasons |= _backbone(facts, machine, found, asked)
    reasons |= _rounds(facts, found)
    reasons |= _machine(machine, found)
    found = merged(found, asked)
    lines = [f"as {base}: {why}"]
    for name, reason in reasons.items():
        given = _asked(asked, name) is not None
        lines.append(f"{name} {_shown(_asked(found, name))}: {'as you ask' if given else reason}")
    if others := [name for name in _told(asked) if name not in reasons]:
        lines.append(f"{', '.join(others)}: as you ask")
    return Choice(found, lines, *estimate(facts, found, machine))


def _base(facts: DataFacts) -> tuple[Path, str]:
    if facts.is_shared:
        return COMPANIES, (
            f"{len(facts.names)} companies {'sell parts of' if facts.has_parts else 'share'} "
            f"{_number(facts.num_catalogues, 'catalogue')}; what one learns of an item holds for the others, in the "
            "model and in their counts, which are summed masked: each alone brought most of what joining is worth "
            "(benchmarks/results/joining.md)"
        )
    if facts.is_tiny:
        return TINY, (
            f"{facts.num_events:,} events are few, so the table of items stays as the texts have it, and the layers "
            "learn (the embedded sample is as small)"
        )
    clients = _number(len(facts.names), "client")
    return DOMAINS, (
        f"{clients} without a catalogue in common; each has its own rows of the table, counts and texts "
        "(benchmarks/results/joining.md)"
    )


def _method(facts: DataFacts) -> tuple[str, str]:
    if len(facts.names) == 1:
        return "local", "there is one client, and nobody to learn from"
    if facts.is_shared:
        return "fedavg", (
            "the companies sell the same items, where no method was clearly ahead of the mean, and this one has secure "
            "sums and robust means (benchmarks/results/joining.md)"
        )
    return "fedecider", (
        "the clients sell different items, where each takes of the others what they have in common with it "
        "(benchmarks/results/joining.md)"
    )


def _weights(facts: DataFacts, found: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, str]:
    """By examples, where companies are unequal and noise does not ask that nobody tells a number of examples."""
    noise = [_asked(asked, f"{block}.noise_scale") for block in ("privacy", "user_privacy")]
    method = asked.get("method", found["method"])
    if facts.spread < UNEQUAL or method != "fedavg" or any(noise) or "weighting" in asked:
        return {}
    found["fedavg"] = {"weighting": "examples"}
    return {
        "fedavg.weighting": (
            f"the largest company has {facts.spread:.0f} times the events of the smallest one; alike, only small ones "
            "gained, by examples all did; each tells how many it has (benchmarks/results/joining.md)"
        )
    }


def _backbone(facts: DataFacts, machine: Machine, found: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, str]:
    """Kind, width and start of the backbone."""
    pretrain = found["pretrain"]
    backbone = pretrain["backbone"]
    # each catalogue is centred on its mean; two heads of even size
    most = max(4, facts.num_texts - facts.num_catalogues) // 4 * 4
    wanted = backbone["d_model"] if facts.is_tiny and not facts.is_shared else WIDTHS[machine.encoder]
    width = _asked(asked, "pretrain.backbone.d_model") or min(wanted, most)
    backbone["d_model"] = width
    if "table" in found["lora_targets"]:
        found["lora_rank"] = width
    reader = "sentence vectors of MiniLM" if machine.encoder == "minilm" else "TF-IDF, 128 wide at most"
    reasons = {
        "pretrain.backbone.kind": (
            "it starts from the item texts, and in the same seconds had twice the ndcg@10 of a T5 from scratch "
            "(docs/backbones.md)"
        ),
        "pretrain.backbone.d_model": (
            "the few texts span no more" if width < wanted else f"{reader} start it; wider was better up to 256"
        )
        + " (docs/backbones.md)",
        "pretrain.samples.synthetic_share": (
            "nobody is public, so the backbone learns from synthetic histories along item texts alone"
            if facts.num_public == 0
            else f"beside {_number(facts.num_public, 'public user')} synthetic histories teach items nobody has seen"
        )
        + " (docs/backbones.md)",
    }
    if facts.num_texts <= facts.num_all_items / 2:
        reasons["pretrain.backbone.d_model"] += (
            f". Warning: {facts.num_all_items:,} items have {facts.num_texts:,} different texts with words, and others "
            "are learned from events alone; give titles if there are any"
        )
    if machine.gpu:
        backbone["num_layers"], found["num_eval_users"] = 4, 0
        reasons["pretrain.backbone.num_layers"] = f"twice as deep, {machine.gpu} has the time; not measured"
    return reasons


def _rounds(facts: DataFacts, found: dict[str, Any]) -> dict[str, str]:
    """Adapters and what is tried before the rounds, number of rounds, steps, hybrid."""
    typical = f"{facts.events_per_user:g} events a user (median)"
    if found["lora_targets"] != "table":
        targets = "what clients with different items can share (docs/backbones.md)"
    elif facts.is_dense:
        targets = (
            f"with {typical} layers may have to learn too, which validation items decide (hyperparameter_candidates; "
        )
        targets += "benchmarks/results/joining.md)"
    else:
        found["hyperparameter_candidates"] = []
        targets = f"with {typical} adapters of the layers were never worth it "
        targets += "(benchmarks/results/joining.md)"
    if facts.is_shared and not facts.is_dense:
        found |= {"num_rounds": 10, "output_lr_multiplier": 60.0, "lr_decay_per_round": 0.9}
        rounds = "steps that start large and shrink need half of twenty, and half of what is sent "
        rounds += "(benchmarks/results/joining.md)"
    elif facts.is_shared:
        rounds = "with many events a user validation rose for twenty (benchmarks/results/joining.md)"
    else:
        rounds = "clients with different items are soon done (benchmarks/results/joining.md)"
    if patience := found.get("patience"):
        rounds += f"; it ends after {_number(patience, 'round')} without a gain"
    hybrid = "own counts and text neighbours beside the model were better in every table"
    hybrid += "; those of the same catalogue are summed masked" if facts.is_shared else ""
    return {
        "lora_targets": targets,
        "num_rounds": rounds,
        "hybrid.kind": f"{hybrid} (docs/hybrid.md)",
    }


def _machine(machine: Machine, found: dict[str, Any]) -> dict[str, str]:
    """Number format and threads; a reason where it is not fp32 and one thread."""
    found["precision"] = "bf16" if machine.bf16_speedup >= PAYS else "fp32"
    found["num_threads"] = threads = num_threads(machine.cores)
    reasons = {"num_threads": f"of {_number(machine.cores, 'core')} (docs/operate.md)"} if threads > 1 else {}
    if found["precision"] == "bf16":
        where = machine.gpu or "this processor"
        reasons["precision"] = f"products are {in_words(machine.bf16_speedup)} in bf16 on {where}"
    return reasons


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _told(asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Options that were asked for, but for the places of data."""
    names: list[str] = []
    for name, value in asked.items():
        if isinstance(value, Mapping):
            names += _told(value, f"{prefix}{name}.")
        elif prefix or name not in ("data", "domains", "seed"):
            names.append(f"{prefix}{name}")
    return names


def _asked(asked: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted option; None where it was not asked for."""
    first, _, rest = name.partition(".")
    value = asked.get(first)
    return _asked(value, rest) if rest and isinstance(value, Mapping) else None if rest else value


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# What a run takes: floating-point operations of its parts over what the machine does in a second, with what each part
# takes beside its products, fitted to runs of ours (benchmarks/results/chosen.md).

ENCODED = 0.45e9
"""Operations of MiniLM for the text of an item, mostly a title."""
SHARED, LOCAL, RANKED = 0.85, 2.0, 5.0
"""Time of stages, rounds and rankings over that of their largest products alone; histories of stages are shorter than
those of users, and a ranking has little but what lies beside its products."""
START_S = 15.0
"""Libraries, data, tables and page."""
NUM_VARIANTS = 2
"""How often a user is ranked in the validation of a round."""
NUM_TEST_ROWS = 8
"""How often after the last one: rows of the table, shares of the update, both splits, the hybrid."""
BASE_GB = 1.5
"""Libraries and MiniLM."""
SOON = 3
"""Rounds after which small data were learned (configs/domains.yaml)."""


def estimate(facts: DataFacts, settings: Mapping[str, Any], machine: Machine) -> tuple[Estimate, float]:
    """Seconds and gigabytes of a run with a small decoder.

    A target costs 2 (D I + L (4 D^2 + 3 D F)) operations forward and three times as many in training, where I is V in
    the stages that all clients share. Of rounds that may end early the mean of all and of the fewest is expected.
    """
    pretrain, rounds = settings["pretrain"], settings["num_rounds"]
    backbone, train, epochs = pretrain["backbone"], pretrain["train"], settings.get("local_epochs", 5)
    width, layers = int(backbone["d_model"]), int(backbone["num_layers"])
    one_layer = 4 * width**2 + 3 * width * 4 * width
    teacher = 2 * (width * facts.num_all_items + layers * one_layer)
    student = 2 * (width * facts.num_items + (layers + 1) // 2 * one_layer)
    length = min(facts.events_per_user, 20.0)
    if patience := settings.get("patience", 0):
        rounds = (rounds + min(rounds, SOON + patience)) / 2

    share = pretrain["samples"].get("synthetic_share", 0.0)
    samples = facts.num_public / (1.0 - share) if facts.num_public else facts.num_all_items
    steps = train.get("max_steps") or train.get("epochs", 1) * samples / train["batch_size"]
    shared = 3 * teacher * length * (steps * train["batch_size"] + settings["distill"]["epochs"] * samples)
    encoded = ENCODED * facts.num_all_items if machine.encoder == "minilm" else 0.0
    targets = max(facts.num_events - 3 * facts.num_users, facts.num_users)
    blocks = len(settings.get("hyperparameter_candidates", ()))
    tried = 2 * (1 + blocks) if blocks else 0  # rounds of every client alone
    local = 3 * student * targets * epochs * (rounds + tried)
    in_round = min(facts.num_users, settings.get("num_eval_users", 0) * len(facts.names) or facts.num_users)
    ranked = student * length * (in_round * (rounds + tried) * NUM_VARIANTS + facts.num_users * NUM_TEST_ROWS)
    expected = START_S + (encoded + SHARED * shared + LOCAL * local + RANKED * ranked) / machine.flops
    table = 4 * width * facts.num_all_items  # teacher and student, each with gradients and two moments
    return Estimate(expected, expected / FACTOR, expected * FACTOR), BASE_GB + 8 * table / 1e9


def _measured_flops(device: str, threads: int) -> float:
    """Of the fastest of some products of a batch's states and a table, in CPU seconds where it is a CPU's."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    before, seconds = torch.get_num_threads(), []
    state_BD, table_DI = torch.ones(512, 256, device=device), torch.ones(256, 4096, device=device)
    torch.set_num_threads(threads)
    try:
        for _ in range(10):
            started = clock()
            _ = state_BD @ table_DI
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * 512 * 256 * 4096 / max(min(seconds), 1e-6)


def chosen_settings(
    options: Mapping[str, Any], allow_long: bool = False, log: Callable[[str], None] = log_line
) -> dict[str, Any]:
    """Settings for the data that ``options`` name, unless they name a backbone of the user's own.

    Empty where nothing is to be chosen; those of the run that it starts from, where it does. Choices, reasons and the
    estimate are logged. A run that goes on has what was chosen when it began.

    Raises:
        ValueError: the output holds a run, or it would take over an hour on this machine, and ``allow_long`` is false.
    """
    for one in (RunConfig, LocalTraining, RankingConfig):
        options = typed(one, options)
    start, output = options.get("start_from"), options.get("output")
    if not (options.get("data") or start):
        return {}
    if options.get("resume"):
        kept = RunFolder(Path(str(output))).chosen
        return load_yaml(kept) if kept.is_file() else {}
    if output:
        check_new(Path(output))  # before anything is read or measured
    if start:
        from fedecider.cross_silo.federate import settings_of  # the models, which --help does without

        return settings_of(start)
    asked = {name: value for name, value in options.items() if name not in PLACES}
    for name in ("pretrain.backbone.name_or_path", "pretrain.backbone.kind"):
        if _asked(asked, name) not in (None, "decoder"):
            log(f"nothing is chosen for these data: {name} is {_asked(asked, name)}, the rest as it is by default")
            return {}
    names = str(asked.get("domains", "")).split(",") + str(asked.get("public_domains", "")).split(",")
    wanted = [name.strip() for name in names if name.strip()] if asked.get("domains") else None
    choice = choose(facts_of(load_domains(str(asked["data"]), wanted)), this_machine(), asked)
    if os.environ.get("RANK", "0") == "0":
        for line in choice.reasons:
            log(f"chosen: {line}")
        log(in_sentence(choice))
    if choice.seconds.expected > LONG_S and not allow_long:
        raise ValueError(
            f"got data that take about {_time(choice.seconds.expected)} on this machine, expected at most an hour "
            "unless you say so: --yes true, in Python allow_long=True, or a smaller num_rounds or "
            "pretrain.backbone.d_model"
        )
    return choice.settings


def in_sentence(choice: Choice) -> str:
    """The estimate."""
    low, high = _time(choice.seconds.low), _time(choice.seconds.high)
    return (
        f"estimate: {_time(choice.seconds.expected)} ({low} to {high}) where nothing else runs, {choice.gigabytes:.1f} "
        "GB of memory"
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"
