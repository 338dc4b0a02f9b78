"""The GPU programme: what needs a card, in parts of under eight minutes on a large one.

    python benchmarks/gpu_programme.py --data data --work runs/gpu_programme [--parts training dense-beauty-t5] [--toy]

Speeds: the ``gpu`` tests, training, rounds, decoding, packed bases, DeepSpeed, the cross-device track, with a T5 of
t5-small's size from random weights and drawn users (texts play no part), each timed after assertions that it is right.
Quality: T5 and decoder with a dense head, 4 + 4 layers of 256 in bf16 (a T5 overflows in fp16), and their students, as
benchmarks/public_bar.py ranks them; a pretrained decoder of the folder ``--model``, packed to nf4, with LoRA; seconds
from prepared data to tested companies. ``--data`` has a folder for each data set, prepared as public_bar.py says.

A part that is finished has its JSON in ``--work`` and is not run again; stages and rounds of a part that was killed go
on. A part that fails says so, the others still run, and the exit code is 1; one without its data, model or library says
what it lacks. ``--toy`` does the same with tiny sizes on any machine. ``--work`` gets the table, page.md.

Shapes: U users, I items, K beams.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import provenance
import public_bar
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration
from written_ids import BACKBONES, CONFIG, DENSE_DECODER, DENSE_T5

import fedecider
from distill.pairing import build_student
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.method import Block
from fedecider.federation.record import read_json, write_json
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.methods import METHODS
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.models.adapters import LoraSettings, attach_lora, base_hash
from fedecider.models.client_model import Base
from fedecider.models.directions import update_norms
from idgen.backbone import load_backbone
from idgen.backbone_training import train_backbone
from idgen.config import BackboneTraining, SampleConfig
from idgen.decode import constrained_beam_search
from idgen.item_ids import ItemIds
from idgen.prompts import prompt_texts
from idgen.ranking import RankingContext, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import eval_batches
from idgen.tasks import Task, build_task
from idgen.tokenizer import train_tokenizer
from idgen.training import Execution

REPOSITORY = Path(__file__).resolve().parents[1]
DOMAINS = ("crime", "comics", "children")
SAMPLES = SampleConfig()  # natural prompts, history 20, source 512: the papers' setting
LIMIT_S = 480
"""Of a part that is a process of its own, seconds."""
MIN_OVERLAP, SCORE_TOLERANCE = 0.5, 0.03
"""Least share of the first ten items that bf16 and fp32 have in common, and the largest relative difference of the
two scores of a shared item: bf16 has 8 bits, and after so little training many items nearly tie."""


class Size(NamedTuple):
    """Model, data and length of the timings."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_items: int
    num_users: int
    """Client users of a domain, and as many public ones."""
    num_events: int
    train_steps: int
    batch_sizes: tuple[int, ...]
    fusion_users: int
    fusion_epochs: int
    decode_users: int
    decode_batches: tuple[int, ...]
    num_beams: int = 20
    lora_rank: int = 8


PAPER = Size(32_100, 512, 64, 2048, 6, 8, 20_000, 5_000, 20, 160, (64, 256), 1_000, 2, 1_024, (32, 256))
TOY = Size(1_000, 32, 16, 64, 2, 2, 60, 48, 7, 24, (16,), 24, 6, 16, (16,))
METHOD = "fedecider"
ROUNDS = {"num_rounds": 2, "local_epochs": 1, "num_eval_users": 100}
SIZES = {"pretrain.backbone.d_model": 256, "pretrain.backbone.num_layers": 4, "eval_batch_size": 256}
BUDGET = public_bar.Budget(2000, 500, SIZES, {"pretrain.train.max_steps": 3000}, {})
TOY_LENGTHS = {"num_rounds": 2, "num_eval_users": 10, "pretrain.train.max_steps": 3, "pretrain.text_encoder": "tfidf"}
TOY_SIZES = {**TOY_LENGTHS, "pretrain.backbone.d_model": 32, "pretrain.backbone.num_layers": 2, "lora_rank": 32}
TOY_BUDGET = public_bar.Budget(40, 20, TOY_SIZES, {}, {})
T5, DECODER = (public_bar.Base(CONFIG, BACKBONES[name], num_companies=4) for name in (DENSE_T5, DENSE_DECODER))
DENSE = {"t5": T5, "decoder": DECODER}
PRETRAINED = public_bar.Base(REPOSITORY / "configs" / "pretrained_decoder.yaml", ROUNDS, 4, has_large_pool=False)
SMALL_POOL = T5._replace(options={**T5.options, "pretrain.train.max_steps": 300}, has_large_pool=False)
END_TO_END = {"decoder, IDs of one token": public_bar.COMPANIES, "T5, dense head": SMALL_POOL}


class Bench(NamedTuple):
    """What all timings work on."""

    size: Size
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    public: list[Task]
    clients: list[Task]


class Row(NamedTuple):
    """One row of the table, beside its part."""

    what: str
    per_s: str
    seconds: str
    memory: str
    remark: str


class Programme(NamedTuple):
    """What is done, on what."""

    device: torch.device
    data: Path
    model: str
    work: Path
    size: Size
    budget: public_bar.Budget

    @property
    def toy(self) -> bool:
        return self.size is TOY


class Lacking(Exception):
    """A part cannot be done here; the message says what it needs."""


class Lists(NamedTuple):
    """Recommendations on the CPU, best first."""

    item_UK: Tensor
    score_UK: Tensor


def make_bench(size: Size, device: torch.device) -> Bench:
    """Three domains with planted successors, item IDs of 4 to 9 drawn tokens."""
    tokenizer = train_tokenizer(prompt_texts("natural", DOMAINS), 400)
    public, clients = [], []
    for number, name in enumerate(DOMAINS):
        rng = np.random.default_rng([7, number])
        ids = drawn_ids(size.num_items, len(tokenizer), size.vocab_size, rng)
        keys = [f"{name}{item:06d}" for item in range(size.num_items)]
        events = [
            Events([f"{name}-{group}{user}" for user in range(size.num_users)], sequences(size, rng), None)
            for group in ("client", "public")
        ]
        domain = Domain(name, Catalogue(name, keys, keys, keys), events[0], events[1], {})
        clients.append(build_task(domain, events[0], ids, tokenizer, SAMPLES, True))
        public.append(build_task(domain, events[1], ids, tokenizer, SAMPLES, False))
    return Bench(size, device, tokenizer, public, clients)


def drawn_ids(count: int, first_token: int, vocab_size: int, rng: np.random.Generator) -> ItemIds:
    """Different random token sequences of lengths 4 to 9; the first token is one of a sixteenth of the vocabulary."""
    heads = first_token + (vocab_size - first_token) // 16
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        rest = rng.integers(first_token, vocab_size, rng.integers(3, 9))
        found[(int(rng.integers(first_token, heads)), *rest.tolist())] = None
    return ItemIds([str(number) for number in range(count)], [list(tokens) for tokens in found], {})


def sequences(size: Size, rng: np.random.Generator) -> list[list[int]]:
    """Users who go on to an item's one successor with probability 0.6, and else take a popular item."""

    def popular_U() -> np.ndarray:
        return (size.num_items ** rng.random(size.num_users)).astype(np.int64) - 1

    columns = [popular_U()]
    for _ in range(size.num_events - 1):
        follows_U = rng.random(size.num_users) < 0.6
        columns.append(np.where(follows_U, (7 * columns[-1] + 3) % size.num_items, popular_U()))
    return np.stack(columns, 1).tolist()


def new_backbone(bench: Bench) -> T5ForConditionalGeneration:
    size, start = bench.size, {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        d_kv=size.d_kv,
        d_ff=size.d_ff,
        num_layers=size.num_layers,
        num_decoder_layers=size.num_layers,
        num_heads=size.num_heads,
        **start,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config).to(bench.device)  # type: ignore[arg-type]


def training(todo: Programme) -> Iterator[Row]:
    """Rows of backbone training; the last backbone is kept for other parts."""
    bench, fp32_loss = make_bench(todo.size, todo.device), 0.0
    for precision, batch_size in [("fp32", bench.size.batch_sizes[0]), *(("bf16", n) for n in bench.size.batch_sizes)]:
        model, loss, row = train(bench, precision, batch_size)
        fp32_loss = fp32_loss or loss
        if (precision, batch_size) == ("bf16", bench.size.batch_sizes[0]):
            away = abs(loss - fp32_loss) / fp32_loss
            assert away < 0.05, f"bf16 ends at loss {loss:.3f}, fp32 at {fp32_loss:.3f}: more than 5 % away"
            row = row._replace(remark=f"{row.remark}; {100 * away:.1f} % away from fp32")
        yield row
    model.save_pretrained(todo.work / "backbone")


def train(bench: Bench, precision: Any, batch_size: int) -> tuple[T5ForConditionalGeneration, float, Row]:
    """Train for some steps: (model, last loss, row). An eighth before them warms up and is not timed."""
    model, steps = new_backbone(bench), bench.size.train_steps
    reset_memory(bench.device)
    config = BackboneTraining(batch_size=batch_size, max_steps=steps, precision=precision)
    logs = train_backbone(model, bench.public, replace(config, max_steps=steps // 8), Execution(0, bench.device))[:1]
    logs += train_backbone(model, bench.public, config, Execution(1, bench.device))
    losses = [log["loss"] for log in logs]
    assert all(np.isfinite(losses)), f"losses {losses}"
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    seconds = sum(log["samples"] / log["samples_per_s"] for log in logs[1:])
    samples = sum(log["samples"] for log in logs[1:])
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    what = f"backbone of {parameters:.1f} M parameters, {precision}, batch {batch_size}"
    remark = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps"
    per_s, memory = f"{samples / seconds:,.0f} samples", peak_memory(bench)
    return model, losses[-1], Row(what, per_s, f"{seconds:.1f}", memory, remark)


def trained(todo: Programme) -> tuple[Bench, Any]:
    """What is timed, with a backbone that was trained for some steps."""
    bench, folder = make_bench(todo.size, todo.device), todo.work / "backbone"
    if not (folder / "config.json").is_file():
        train(bench, "bf16", todo.size.batch_sizes[-1])[0].save_pretrained(folder)
    return bench, load_backbone(folder, range(todo.size.vocab_size), "none", todo.device)  # as many tokens as rows


def fusion(todo: Programme, quantize: Any = "none") -> Iterator[Row]:
    """Two rounds of FeDecider on the student of half depth: plain LoRA, then the fusion of K directions."""
    bench, backbone = trained(todo)
    size, tasks = bench.size, [first_users(task, bench.size.fusion_users, bench) for task in bench.clients]
    with tempfile.TemporaryDirectory() as folder:
        build_student(backbone).save_pretrained(folder)
        frozen = load_backbone(folder, range(size.vocab_size), quantize, bench.device)
    model = attach_lora(frozen, LoraSettings(rank=size.lora_rank))
    ranking = RankingConfig(num_beams=size.num_beams, eval_batch_size=size.decode_batches[-1])
    models = client_models(
        Base(model, bench.tokenizer, RankingContext(ranking, device=bench.device)),
        tasks,
        LocalTraining(local_epochs=size.fusion_epochs, batch_size=size.batch_sizes[0], precision="bf16"),
        seed=0,
    )
    before, method = base_hash(model), METHODS["fedecider"]
    blocks = [Block(torch.tensor([client]), task) for client, task in enumerate(tasks)]
    records: list[dict[str, Any]] = []
    memory: list[str] = []

    def on_round(record: dict[str, Any]) -> None:
        records.append(record)
        memory.append(peak_memory(bench))
        reset_memory(bench.device)

    reset_memory(bench.device)
    built = method.build(models, method.config())
    state = run_rounds(
        built,
        Clients(blocks, metrics_per_client),
        RoundSettings(len(("plain", "fusion")), 0),
        callbacks=[RoundCallback(lambda round: on_round(round.record))],
    )
    assert base_hash(model) == before, "training changed the frozen backbone"
    norms = update_norms(state.server)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-4), "a broadcast direction has no unit norm"
    samples = size.fusion_epochs * sum(client.num_examples for client in models.clients)
    for record, peak, kind in zip(records, memory, ("plain", f"K = {len(tasks)} directions"), strict=True):
        first, last = check_round(record)
        per_s, seconds = f"{samples / record['train_s']:,.0f} samples", f"{record['train_s']:.1f}"
        base = "" if quantize == "none" else f", base {quantize}"
        what = f"LoRA round, {kind}, r = {size.lora_rank}, bf16, batch {size.batch_sizes[0]}{base}"
        loop = 100 * (record["wall_s"] / record["train_s"] - 1)
        remark = f"loss {first:.3f} to {last:.3f}; the round loop adds {loop:.2f} %"
        yield Row(what, per_s, seconds, peak, remark)


def check_round(record: dict[str, Any]) -> tuple[float, float]:
    """Mean loss of the first and of the last local epoch."""
    assert all(client["finite"] for client in record["clients"]), f"round {record['round']}: a client is not finite"
    first, last = (float(np.mean([client[name] for client in record["clients"]])) for name in ("first_loss", "loss"))
    assert last < first, f"round {record['round']}: the loss does not fall, {first} to {last}"
    return first, last


def first_users(task: Task, count: int, bench: Bench) -> Task:
    """The task of the first ``count`` users only: speed does not depend on their number, the time taken does."""
    keys = [f"{task.name}{item:06d}" for item in range(len(task.trie))]
    users, chosen = [f"u{user}" for user in range(count)], task.sequences[:count]
    events = Events(users, chosen, None)
    domain = Domain(task.name, Catalogue(task.name, keys, keys, keys), events, Events([], [], None), {})
    return build_task(domain, events, task.item_ids, bench.tokenizer, SAMPLES, True)


def decode(todo: Programme) -> Iterator[Row]:
    """Constrained beam search with the whole backbone, in fp32 and bf16."""
    bench, backbone = trained(todo)
    size, task = bench.size, bench.clients[0]
    users = torch.arange(min(size.decode_users, len(task.sequences)))
    some = users[: size.decode_batches[0]]
    fp32, bf16 = (recommendations(backbone, task, some, size.num_beams, p, bench.device) for p in ("fp32", "bf16"))
    for lists in (fp32, bf16):
        check_lists(lists, len(task.trie), size.num_beams)
    remark = f"first ten in bf16 and fp32: {agreement(fp32, bf16, MIN_OVERLAP, SCORE_TOLERANCE):.3f} shared"
    for precision, batch_size in [("fp32", size.decode_batches[0]), *(("bf16", n) for n in size.decode_batches)]:
        ranking = RankingConfig(num_beams=size.num_beams, eval_batch_size=batch_size)

        def rank(chosen: Tensor, ranking: RankingConfig = ranking, precision: str = precision) -> Tensor:
            return rank_task(backbone, task, "valid", chosen, RankingContext(ranking, True, precision, bench.device))

        rank(users[:batch_size])
        reset_memory(bench.device)
        started = time.perf_counter()
        rank(users)
        seconds = time.perf_counter() - started
        what = f"{size.num_beams} beams, {len(task.trie):,} items, {precision}, batch {batch_size}"
        row = Row(what, f"{len(users) / seconds:,.0f} users", f"{seconds:.1f}", peak_memory(bench), remark)
        yield row


def recommendations(
    model: Any, task: Task, users: Tensor, num_beams: int, precision: str, device: torch.device
) -> Lists:
    """The lists of ``users`` for validation, in their order."""
    (found,) = eval_batches(task, "valid", len(users), users)
    user_B, input_ids, attention_mask, _ = found
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        item_BK, score_BK = constrained_beam_search(
            model, input_ids.to(device), attention_mask.to(device), task.trie.to(device), num_beams
        )
    order = user_B.argsort()
    return Lists(item_BK.cpu()[order], score_BK.float().cpu()[order])


def check_lists(lists: Lists, num_items: int, num_beams: int) -> None:
    """Full lists of different items of the catalogue, best first."""
    item_UK, score_UK = lists
    assert item_UK.shape[1] == num_beams
    assert bool(((item_UK >= 0) & (item_UK < num_items)).all()), "an item outside the catalogue"
    assert all(len(set(items)) == num_beams for items in item_UK.tolist()), "an item twice in a list"
    assert bool(torch.isfinite(score_UK).all())
    assert bool((score_UK.diff(dim=1) <= 0).all()), "a list is not sorted"


def agreement(wanted: Lists, found: Lists, min_overlap: float, tolerance: float, k: int = 10) -> float:
    """Mean share of the first ``k`` items that two lists have in common; both must be as alike as asked."""
    same_UKK = wanted.item_UK[:, :k, None] == found.item_UK[:, None, :k]
    away_UKK = (found.score_UK[:, None, :k] / wanted.score_UK[:, :k, None] - 1).abs()
    shared, away = float(same_UKK.any(2).float().mean()), float(away_UKK[same_UKK].max())
    assert shared >= min_overlap, f"only {shared:.3f} of the first {k} items are shared, expected {min_overlap}"
    assert away <= tolerance, f"the two scores of an item are up to {100 * away:.2f} % away"
    return shared


def gpu_tests(todo: Programme) -> Iterator[Row]:
    """The tests marked gpu; only their files are collected, so that other tests' imports may be missing."""
    started, folder = time.perf_counter(), REPOSITORY / "tests"
    paths = sorted(str(path) for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text())
    paths = [str(folder / "test_launch.py")] if todo.toy else paths  # the subprocess is tried, not the tests
    done = call([sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *paths])
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode in (0, 5), f"pytest -m gpu: {lines[-1]}"  # 5: nothing is marked gpu there
    yield Row("pytest -m gpu", "-", f"{time.perf_counter() - started:.1f}", "-", lines[-1].strip("= "))


def embedding(todo: Programme) -> Iterator[Row]:
    """FedMF on MovieLens-1M, whose data the reader fetches or knows; in a process of its own."""
    shape = "toy" if todo.toy else "ml-1m"
    words = ["--case", f"shape:{shape}", "--device", todo.device.type, "--rounds", "3"]
    done = call([sys.executable, str(REPOSITORY / "benchmarks" / "embedding.py"), *words])
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"shape {shape}: {' '.join(done.stderr.split())[-300:]}"
    result = json.loads(lines[0].removeprefix("RESULT "))
    remark = f"{result['cohort']:,} of {result['users']:,} clients a round, {result['items']:,} items"
    yield Row(f"FedMF, {shape}", "-", f"{result['ours_s']:.2f} a round", f"{result['peak_gb']:.2f} (GB)", remark)


def quantized(todo: Programme) -> Iterator[Row]:
    """The same rounds on students in 4 and 8 bits."""
    needed("bitsandbytes")
    for quantize in ("nf4", "int8"):
        yield from fusion(todo, quantize)


def deepspeed(todo: Programme) -> Iterator[Row]:
    """One federated round on the embedded sample by the plain loop, and through ZeRO-2 and ZeRO-3, in one process."""
    needed("deepspeed")
    script, losses = str(REPOSITORY / "scripts" / "federate.py"), {}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "zero2", "zero3"):
            config = str(REPOSITORY / "configs" / "deepspeed" / f"{name}.json")
            words = [] if name == "plain" else ["--use_deepspeed", "--deepspeed_config_file", config]
            run = ["--num_rounds", "1", "--output", f"{folder}/{name}", "--cache", f"{folder}/cache"]
            done = call([*launcher, *words, script, "--domains", "crime,comics", *run])
            assert done.returncode == 0, f"{name}: exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
            (record,) = (json.loads(line) for line in Path(folder, name, "rounds.jsonl").read_text().splitlines())
            losses[name] = np.array([client["loss"] for client in record["clients"]])
            away = float(np.abs(losses[name] / losses["plain"] - 1).max())
            assert away < 1e-3, f"{name}: losses {losses[name]}, plain {losses['plain']}"
            remark = f"losses {100 * away:.4f} % away from the plain loop"
            yield Row(f"one round, {name}", "-", f"{record['train_s']:.1f}", "-", remark)


def needed(library: str) -> None:
    if find_spec(library) is None:
        raise Lacking(f"{library} is not installed")


def prepared(todo: Programme, dataset: str) -> Domain:
    if todo.toy:
        return sample_domains(["crime"])["crime"]
    if not (todo.data / dataset).is_dir():
        raise Lacking(f"no {todo.data / dataset} (--data; benchmarks/public_bar.py says how it is prepared)")
    return load_domains(todo.data / dataset, [dataset])[dataset]


def dense(todo: Programme, dataset: str, kind: str) -> Iterator[Row]:
    """A backbone that writes and ranks, and its student, on the users of all clients and of the pool."""
    domain = prepared(todo, dataset)
    for name, entry in (("whole", "teacher"), ("half depth", "student")):
        reset_memory(todo.device)
        row = public_bar.Row(entry, DENSE[kind])
        cell = public_bar.measured(public_bar.Cell(domain, row, 0, todo.budget, todo.device, todo.work, Path()))
        assert cell["places"], cell["ended"]
        hit, ndcg = map(public_bar.shown, public_bar.scores(cell, "strict"))
        remark, seconds = f"R@10 {hit}, N@10 {ndcg}", f"{60 * cell['minutes']:.1f}"
        yield Row(f"{domain.name}: {kind}, {name}", "-", seconds, peak_memory(todo), remark)


def pretrained(todo: Programme) -> Iterator[Row]:
    """Four companies adapt a student of half depth, which is packed to four bits where that can be."""
    if not Path(todo.model, "config.json").is_file():
        raise Lacking("no folder of a pretrained decoder with its tokenizer (--model FOLDER)")
    quantize = "nf4" if find_spec("bitsandbytes") else "none"
    base = PRETRAINED._replace(options={**ROUNDS, "pretrain.backbone.name_or_path": todo.model, "quantize": quantize})
    users = min(100, todo.budget.company_users)
    few = todo._replace(budget=todo.budget._replace(company_users=users, decoder={}))
    yield federated(few, base, f"{Path(todo.model).name}, base {quantize}", todo.work)


def end_to_end(todo: Programme) -> Iterator[Row]:
    """From prepared data to tested companies, nothing kept from before."""
    for name, base in END_TO_END.items():
        with tempfile.TemporaryDirectory(dir=todo.work) as folder:
            yield federated(todo, base, name, Path(folder))


def federated(todo: Programme, base: public_bar.Base, name: str, work: Path) -> Row:
    clients = public_bar.companies(prepared(todo, "beauty"), base, todo.budget, 0)
    options = {**public_bar.options_of(base, todo.budget, todo.device), **(TOY_LENGTHS if todo.toy else {})}
    given = {"output": work / "run", "cache": str(work / "cache"), "resume": True, "progress": False}
    output, started = work / "run", time.perf_counter()
    reset_memory(todo.device)
    fedecider.federate(clients, METHOD, config=base.config, **given, **options)
    seconds, metrics = time.perf_counter() - started, read_json(output / "metrics.json")
    test, records = metrics["macro"]["test"], [json.loads(line) for line in (output / "rounds.jsonl").open()]
    ndcg = {entry: f"{test[entry]['ndcg@10']['mean']:.4f}" for entry in ("zero-shot student", metrics["reported"])}
    rounds = f"{len(records)} rounds, {sum(record['train_s'] for record in records):.1f} s of local training"
    what, remark = f"{len(clients)} companies, {METHOD}: {name}", f"ndcg@10 {ndcg}; {rounds}"
    return Row(what, "-", f"{seconds:.1f}", peak_memory(todo), remark)


def call(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(bench: Bench | Programme) -> str:
    """GiB that tensors took on the GPU since the last reset; on a CPU the peak of the whole process so far."""
    if bench.device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(bench.device) / 2**30:.2f}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} (process)"


SPEEDS = (gpu_tests, training, fusion, decode, quantized, embedding, deepspeed)
PARTS: dict[str, Callable[..., Iterator[Row]]] = {part.__name__: part for part in (*SPEEDS, pretrained, end_to_end)}
PARTS |= {
    f"dense-{dataset}-{kind}": partial(dense, dataset=dataset, kind=kind)
    for dataset in ("beauty", "toys", "sports")
    for kind in DENSE
}


def page(todo: Programme, parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of the parts that were done."""
    name = torch.cuda.get_device_name(todo.device) if todo.device.type == "cuda" else "no GPU"
    lines = ["# GPU programme", "", *provenance.heading("gpu_programme.py", torch.get_num_threads()), f"- GPU: {name}"]
    lines += [f"- Sizes: {json.dumps([todo.size._asdict(), todo.budget._asdict()])}"]
    lines += [f"- {part}: commit {done['commit']}, {done['seconds']:.0f} s" for part, done in parts.items()]
    lines += ["", "| part | what | per second | seconds | peak memory, GiB | remark |", "|---|---|---|---|---|---|"]
    cells = [[part, *row] for part, done in parts.items() for row in done["rows"]]
    return [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to do, default all")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with beauty, toys, sports")
    parser.add_argument("--model", default="", help="folder of a pretrained decoder")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_programme"), help="parts, stages, page")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script itself")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (TOY, TOY_BUDGET) if args.toy else (PAPER, BUDGET)
    todo = Programme(device, args.data, args.model, args.work / ("toy" if args.toy else "whole"), *sizes)
    todo.work.mkdir(parents=True, exist_ok=True)
    files, failed = {part: todo.work / f"{part}.json" for part in PARTS}, False
    for part in args.parts:
        if files[part].is_file():
            continue
        started, commit, rows = time.perf_counter(), provenance.git_commit(), []
        try:
            for row in PARTS[part](todo):
                rows.append(row)
                print(f"{part} | {' | '.join(row)}", flush=True)
        except Exception as error:  # the other parts are worth having all the same
            failed |= not isinstance(error, Lacking)
            how = "not done" if isinstance(error, Lacking) else f"FAILED, {type(error).__name__}"
            print(f"{part}: {how}: {' '.join(str(error).split())[:400]}", flush=True)
            continue
        write_json(files[part], {"commit": commit, "seconds": time.perf_counter() - started, "rows": rows})
        done = {part: read_json(path) for part, path in files.items() if path.is_file()}
        (todo.work / "page.md").write_text("\n".join(page(todo, done)) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
