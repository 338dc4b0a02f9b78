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
from typing import Any, NamedTuple

import torch

from fedecider.cross_silo.command_line import make_settings
from fedecider.cross_silo.estimate import FACTOR, ROOM, DataFacts, Estimate, draw, estimate, facts_of, time_text
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.encoders import KEYS, chosen_encoder
from fedecider.data.store import load_domains
from fedecider.methods.config import LocalTraining
from fedecider.running.machine import available_bytes
from fedecider.running.options import merged, typed
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, check_new
from fedecider.running.settings_files import load_yaml
from idgen.candidates import SAMPLED_ABOVE
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
MANY_ROWS = 100_000
"""Items times clients from which tables are half as wide: each client keeps several (its own, sent, the best one)."""
MANY_EVENTS = 500_000
"""From which one pass a round, and `FEW_ROUNDS`, teach more than ten rounds of small data."""
FEW_ROUNDS = 5
WIDTHS = {"minilm": 256, "tfidf": 128}
"""Wider was better up to 256 (docs/backbones.md); vectors of TF-IDF have 128 numbers at most."""
LONG_S = 3600.0
"""What takes longer is not begun unasked."""
SEEDS = 3
"""Training runs where they are short."""
SHORT_S = 600.0
"""What `SEEDS` training runs may take together, unasked."""
UNEQUAL = 4.0
"""Times the events of the smallest client from which the largest one would gain nothing from equal weights; measured
is 33 times."""
WITHOUT_TEXTS = "no item has a text, so each ID is one token whose row starts at random"
PLACES = ("output", "cache", "resume", "tracker")
"""Options that say where things are, and are no part of a configuration."""


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


class Choice(NamedTuple):
    """What is chosen, why, and what it will take."""

    settings: dict[str, Any]
    """As a YAML configuration has them, with what was asked for."""
    reasons: list[str]
    """A line for each choice."""
    estimate: Estimate


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
    if not facts.num_texts:
        found["pretrain"]["text_encoder"] = KEYS
        reasons = {"pretrain.text_encoder": WITHOUT_TEXTS, **reasons}
    reasons |= _weights(facts, found, asked)
    reasons |= _backbone(facts, machine, found, asked)
    reasons |= _rounds(facts, found)
    reasons |= _machine(machine, found)
    if not facts.num_texts:
        reasons |= {f"pretrain.{name}": WITHOUT_TEXTS for name in ("backbone.kind", "samples.synthetic_share")}
        reasons["pretrain.backbone.d_model"] = "random rows have at most as many dimensions as there are items"
    found = merged(found, asked)
    lines = [f"as {base}: {why}"]
    for name, reason in reasons.items():
        given = _asked(asked, name) is not None
        lines.append(f"{name} {_shown(_asked(found, name))}: {'as you ask' if given else reason}")
    if others := [name for name in _told(asked) if name not in reasons]:
        lines.append(f"{', '.join(others)}: as you ask")
    return Choice(found, lines, estimate(facts, make_settings({}, found), machine.flops))


def _base(facts: DataFacts) -> tuple[Path, str]:
    if facts.is_shared:
        return COMPANIES, (
            f"{len(facts.names)} companies {'sell parts of' if facts.has_parts else 'share'} "
            f"{_number(facts.num_catalogues, 'catalogue')}; what one learns of an item holds for the others, in the "
            "model and in their counts, which are summed masked: each alone brought most of what joining is worth "
            "(benchmarks/results/joining.md)"
        )
    if facts.num_events < NUM_TINY:
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
            "the companies sell the same items, where the best method is .003 ndcg@10 ahead of the mean, and this one "
            "has secure aggregation and robust means (benchmarks/results/joining.md)"
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
    most = max(4, (facts.num_texts or facts.num_all_items) - facts.num_catalogues) // 4 * 4
    wanted = backbone["d_model"] if facts.num_events < NUM_TINY and not facts.is_shared else WIDTHS[machine.encoder]
    is_large = facts.num_all_items * len(facts.names) > MANY_ROWS
    wanted = min(wanted, 128) if is_large else wanted
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
            "the few texts span no more"
            if width < wanted
            else f"{facts.num_all_items:,} items, of which each client has tables, take room and time; wider is better"
            if is_large
            else f"{reader} start it; wider was better up to 256"
        )
        + " (docs/backbones.md)",
        "pretrain.samples.synthetic_share": (
            "nobody is public, so the backbone learns from synthetic histories along item texts alone"
            if facts.num_public == 0
            else f"beside {_number(facts.num_public, 'public user')} synthetic histories teach items nobody has seen"
        )
        + " (docs/backbones.md)",
    }
    if 0 < facts.num_texts <= facts.num_all_items / 2:
        reasons["pretrain.backbone.d_model"] += (
            f". Warning: {facts.num_all_items:,} items have {facts.num_texts:,} different texts with words, and others "
            "are learned from events alone; give titles if there are any"
        )
    if facts.num_all_items > SAMPLED_ABOVE and facts.num_public == 0:
        found["distill"]["epochs"] = 1
        reasons["distill.epochs"] = (
            f"one pass is a synthetic history for each of {facts.num_all_items:,} items, which are many; not measured"
        )
    if machine.gpu:
        backbone["num_layers"], found["num_eval_users"] = 4, 0
        reasons["pretrain.backbone.num_layers"] = f"twice as deep, {machine.gpu} has the time; not measured"
    return reasons


def _rounds(facts: DataFacts, found: dict[str, Any]) -> dict[str, str]:
    """Adapters and what is tried before the rounds, number of rounds, steps, ensemble."""
    typical = f"{facts.events_per_user:g} events a user (median)"
    if found["lora_targets"] != "table":
        targets = "what clients with different items can share (docs/backbones.md)"
    elif facts.events_per_user >= NUM_DENSE:
        targets = (
            f"with {typical} layers may have to learn too, which validation items decide (hyperparameter_candidates; "
        )
        targets += "benchmarks/results/joining.md)"
    else:
        found["hyperparameter_candidates"] = []
        targets = f"with {typical} adapters of the layers were never worth it "
        targets += "(benchmarks/results/joining.md)"
    if facts.is_shared and not facts.events_per_user >= NUM_DENSE:
        found |= {"num_rounds": 10, "output_lr_multiplier": 60.0, "lr_decay_per_round": 0.9}
        rounds = "steps that start large and shrink need half of twenty, and half of what is sent "
        rounds += "(benchmarks/results/joining.md)"
    elif facts.is_shared:
        rounds = "with many events a user validation rose for twenty (benchmarks/results/joining.md)"
    else:
        rounds = "clients with different items are soon done (benchmarks/results/joining.md)"
    if facts.num_events > MANY_EVENTS:
        found |= {"num_rounds": FEW_ROUNDS, "local_epochs": 1, "hyperparameter_candidates": []}
        rounds = f"{facts.num_events:,} events are many, so each is seen once a round; not measured"
        targets = "nothing is tried before the rounds, which would take as long as they do; not measured"
    if patience := found.get("patience"):
        rounds += f"; it ends after {_number(patience, 'round')} without a gain"
    ensemble = "own counts and text neighbours beside the model were better in every table"
    ensemble += "; those of the same catalogue are summed masked" if facts.is_shared else ""
    return {
        "lora_targets": targets,
        "num_rounds": rounds,
        "ensemble.kind": f"{ensemble} (docs/ensemble.md)",
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
    options: Mapping[str, Any],
    allow_long: bool = False,
    log: Callable[[str], None] = log_line,
    minutes: float = 0.0,
    config: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Settings for the data that ``options`` name, unless they name a backbone of the user's own; those of ``config``,
    where it is given; and the reasons.

    Empty where nothing is to be chosen; those of the run that it starts from, where it does. The estimate is logged.
    ``minutes``: what would take longer is done with a part of the customers and rounds (`draw`), which is logged
    first; 0: all are taken. A run that goes on has what was chosen when it began.

    Raises:
        ValueError: the output holds a run, or it would take over an hour on this machine, and ``allow_long`` is false;
            ``minutes`` that are too few, or with a run whose time is not known.
    """
    for one in (RunConfig, LocalTraining, RankingConfig):
        options = typed(one, options)
    start, output = options.get("start_from"), options.get("output")
    if minutes and (start or not options.get("data")):
        raise ValueError("got minutes without data of one's own, or with start_from, expected --data or --events")
    if not (options.get("data") or start):
        return {}, []
    if options.get("resume"):
        kept = RunFolder(Path(str(output))).chosen
        return load_yaml(kept) if kept.is_file() else {}, []
    if output:
        check_new(Path(output))  # before anything is read or measured
    if start:
        from fedecider.cross_silo.federate import settings_of  # the models, which --help does without

        return settings_of(start), []
    asked = {name: value for name, value in options.items() if name not in PLACES}
    named = merged(dict(config or {}), asked)
    for name in ("pretrain.backbone.name_or_path", "pretrain.backbone.kind"):
        given = _asked(named, name) or ("t5" if config is not None and name.endswith("kind") else None)
        if given not in (None, "decoder"):
            if minutes:
                raise ValueError(
                    f"got minutes with {name} {given}, expected a small decoder from scratch (pretrain.backbone.kind "
                    "decoder): how long others take is not known"
                )
            log(f"nothing is chosen for these data: {name} is {given}, the rest as it is by default")
            return {}, []
    names = str(named.get("domains", "")).split(",") + str(named.get("public_domains", "")).split(",")
    wanted = [name.strip() for name in names if name.strip()] if named.get("domains") else None
    facts, machine = facts_of(load_domains(str(named["data"]), wanted)), this_machine()
    if config is None:
        choice = choose(facts, machine, asked)
    else:
        choice = Choice(named, [], estimate(facts, make_settings({}, named), machine.flops))
    drawn = draw(facts, make_settings({}, choice.settings), machine.flops, minutes) if minutes else None
    settings, reasons = {**choice.settings, **(drawn.settings if drawn else {})}, choice.reasons
    planned = drawn.estimate if drawn else choice.estimate
    if config is None and _affords_seeds(settings, planned, minutes):
        settings["seeds"] = SEEDS
        reasons = [*reasons, f"seeds {SEEDS}: runs differ by more than customers, and these are short"]
    if os.environ.get("RANK", "0") == "0":
        log("; ".join([*([drawn.text] if drawn else []), in_sentence(planned, settings.get("seeds", 1))]))
    if drawn:
        return settings, reasons
    if choice.estimate.expected > LONG_S and not (allow_long or minutes):
        raise ValueError(
            f"got data that take about {time_text(choice.estimate.expected)} on this machine, expected at most an hour "
            "unless you say so: --minutes 10 for an answer from a part of the customers, in Python minutes=10; --yes "
            "true for all, in Python allow_long=True"
        )
    return settings, reasons


def _affords_seeds(settings: Mapping[str, Any], found: Estimate, minutes: float) -> bool:
    """Whether `SEEDS` training runs are short, and nothing speaks against them: noise is spent by each run."""
    noise = [_asked(settings, f"{block}.noise_scale") for block in ("privacy", "user_privacy")]
    several = len(str(settings["domains"]).split(",")) > 1 and settings.get("method") != "local"
    room_s = minutes * 60 / ROOM if minutes else SHORT_S
    return "seeds" not in settings and several and not any(noise) and SEEDS * found.expected <= room_s


def in_sentence(found: Estimate, seeds: int = 1) -> str:
    """The estimate of so many training runs."""
    expected = found.expected * seeds
    runs = f" for {seeds} training runs" if seeds > 1 else ""
    low, high = time_text(expected / FACTOR), time_text(expected * FACTOR)
    return (
        f"estimate: {time_text(expected)}{runs} ({low} to {high}) on an idle machine, {found.gigabytes:.1f} GB of "
        "memory"
    )
