"""The GPU programme: the ``gpu`` tests, paper-scale timings, and one federated run on prepared data.

Run: PYTHONPATH=. python benchmarks/gpu.py [--output FILE.md] [--data FOLDER --config FILE]; its table is a section of
benchmarks/results/speed.md.
Under 25 minutes in all; ``--parts`` does some of it, ``--toy`` the same with tiny sizes on any machine. The timings
use a T5 of t5-small's size from scratch and synthetic domains of the paper's size (token IDs are drawn, texts play no
part), because neither needs a download. Every timing first asserts that what is timed is right. A part that fails
leaves a row that says so, the others still run, and the exit code is 1. Quality is measured by
``benchmarks/public_bar.py --budget gpu --cells 1``, which adds a cell, sized for ten minutes at most, to its page.

Needs torch, transformers, peft, accelerate, tokenizers, scipy and pytest; for the run also pydantic, docstring_parser
and plotly.
Shapes: U users, I items, K beams.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import provenance
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

from distill.pairing import build_student
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.method import Block
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.methods import METHODS
from fedecider.methods.client_models import client_models
from fedecider.methods.config import LocalTraining
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import (
    LoraSettings,
    attach_lora,
    base_hash,
    named_factors,
)
from fedecider.models.client_model import Base
from fedecider.models.directions import update_norms
from idgen.backbone import load_backbone
from idgen.backbone_training import train_backbone
from idgen.config import BackboneTraining, Quantize, SampleConfig
from idgen.decode import constrained_beam_search
from idgen.item_ids import ItemIds
from idgen.prompts import prompt_texts
from idgen.ranking import RankingContext, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import eval_batches, train_batches
from idgen.tasks import Task, build_task
from idgen.tokenizer import train_tokenizer
from idgen.training import Execution

REPOSITORY = Path(__file__).resolve().parents[1]
DOMAINS = ("crime", "comics", "children")
PARTS = ("tests", "training", "fusion", "decode", "quantized", "embedding", "deepspeed", "run")
SAMPLES = SampleConfig()  # natural prompts, history 20, source 512: the papers' setting
TESTS_S, RUN_S = 420, 720
"""Limits of the two subprocesses, seconds."""
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
TOY = Size(1_000, 32, 16, 64, 2, 2, 60, 48, 7, 24, (16,), 24, 3, 16, (16,))


class Bench(NamedTuple):
    """What all timings work on."""

    size: Size
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    public: list[Task]
    clients: list[Task]


class Row(NamedTuple):
    """One row of the table."""

    part: str
    what: str
    per_s: str
    seconds: str
    memory: str
    remark: str


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


def training(bench: Bench) -> Iterator[Row | T5ForConditionalGeneration]:
    """Rows of backbone training, and every trained backbone: the other parts use the last one."""
    yield batches_alone(bench)
    fp32_loss = 0.0
    for precision, batch_size in [("fp32", bench.size.batch_sizes[0]), *(("bf16", n) for n in bench.size.batch_sizes)]:
        model, loss, row = train(bench, precision, batch_size)
        yield model
        fp32_loss = fp32_loss or loss
        if (precision, batch_size) == ("bf16", bench.size.batch_sizes[0]):
            away = abs(loss - fp32_loss) / fp32_loss
            assert away < 0.05, f"bf16 ends at loss {loss:.3f}, fp32 at {fp32_loss:.3f}: more than 5 % away"
            row = row._replace(remark=f"{row.remark}; {100 * away:.1f} % away from fp32")
        yield row


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
    timed = logs[1:]
    seconds = sum(log["samples"] / log["samples_per_s"] for log in timed)
    samples = sum(log["samples"] for log in timed)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    what = f"backbone of {parameters:.1f} M parameters, {precision}, batch {batch_size}"
    remark = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps"
    row = Row("training", what, f"{samples / seconds:,.0f} samples", f"{seconds:.1f}", peak_memory(bench), remark)
    return model, losses[-1], row


def batches_alone(bench: Bench) -> Row:
    """Drawing batches without training: what the processor can feed."""
    batch_size = bench.size.batch_sizes[-1]
    started, samples, tokens = time.perf_counter(), 0, 0
    batches = train_batches(bench.public, batch_size, torch.Generator().manual_seed(0))
    for batch in itertools.islice(batches, bench.size.train_steps):
        samples += len(batch["labels"])
        tokens += int(batch["attention_mask"].sum())
    seconds = time.perf_counter() - started
    remark = f"{tokens / samples:.0f} input tokens a sample"
    what = f"drawing batches of {batch_size} alone"
    return Row("training", what, f"{samples / seconds:,.0f} samples", f"{seconds:.1f}", "-", remark)


def fusion(bench: Bench, backbone: T5ForConditionalGeneration) -> Iterator[Row]:
    """Two rounds of FeDecider on the student of half depth: plain LoRA, then the fusion of K directions."""
    size, tasks = bench.size, [first_users(task, bench.size.fusion_users, bench) for task in bench.clients]
    model = attach_lora(build_student(backbone), LoraSettings(rank=size.lora_rank))
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
        what = f"LoRA round, {kind}, r = {size.lora_rank}, bf16, batch {size.batch_sizes[0]}"
        loop = 100 * (record["wall_s"] / record["train_s"] - 1)
        remark = f"loss {first:.3f} to {last:.3f}; the round loop adds {loop:.2f} %"
        yield Row("fusion", what, per_s, seconds, peak, remark)
    ranked = len(built.variants) * sum(len(task.sequences) for task in tasks)
    seconds = records[-1]["evaluate_s"]
    what = f"validation of that round, {size.num_beams} beams, batch {size.decode_batches[-1]}"
    yield Row("fusion", what, f"{ranked / seconds:,.0f} users", f"{seconds:.1f}", memory[-1], "student, K directions")


def check_round(record: dict[str, Any]) -> tuple[float, float]:
    """Mean loss of the first and of the last local epoch."""
    for client in record["clients"]:
        assert client["finite"], f"round {record['round']}: client {client['client']} is not finite"
    if record["round"] > 1:
        assert all(value != 2.0 for client in record["clients"] for value in client["alpha"]), "weights did not move"
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


def decode(bench: Bench, backbone: T5ForConditionalGeneration) -> Iterator[Row]:
    """Constrained beam search with the whole backbone, in fp32 and bf16."""
    size, task = bench.size, bench.clients[0]
    users = torch.arange(min(size.decode_users, len(task.sequences)))
    some = users[: size.decode_batches[0]]
    fp32, bf16 = (recommendations(backbone, task, some, size.num_beams, p, bench.device) for p in ("fp32", "bf16"))
    for lists in (fp32, bf16):
        check_lists(lists, len(task.trie), size.num_beams)
    remark = f"first ten in bf16 and fp32: {agreement(fp32, bf16, MIN_OVERLAP, SCORE_TOLERANCE):.3f} shared"
    if bench.device.type == "cuda":
        host = recommendations(backbone.cpu(), task, some[:4], size.num_beams, "fp32", torch.device("cpu"))
        backbone.to(bench.device)  # type: ignore[arg-type]
        same = agreement(host, Lists(*(value[:4] for value in fp32)), 0.95, 1e-3)
        remark += f"; on GPU and CPU in fp32: {same:.3f}"
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
        row = Row("decode", what, f"{len(users) / seconds:,.0f} users", f"{seconds:.1f}", peak_memory(bench), remark)
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


def gpu_tests(paths: Sequence[str]) -> Iterator[Row]:
    """The tests marked gpu; by default only their files are collected, so that other tests' imports may be missing."""
    started, folder = time.perf_counter(), REPOSITORY / "tests"
    paths = paths or sorted(str(path) for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *paths]
    done = call(command, TESTS_S)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode in (0, 5), f"pytest -m gpu: {lines[-1]}"  # 5: nothing is marked gpu there
    yield Row("tests", "pytest -m gpu", "-", f"{time.perf_counter() - started:.1f}", "-", lines[-1].strip("= "))


def embedding_shapes(device: torch.device, shapes: str) -> Iterator[Row]:
    """benchmarks/embedding.py at its larger shapes, a process each; a shape whose data are absent is a failure."""
    for shape in shapes.split(","):
        words = ["--case", f"shape:{shape}", "--device", device.type, "--rounds", "3"]
        done = call([sys.executable, str(REPOSITORY / "benchmarks" / "embedding.py"), *words], RUN_S)
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert found, f"shape {shape}: {' '.join(done.stderr.split())[-300:]}"
        one = json.loads(found[0].removeprefix("RESULT "))
        remark = f"{one['cohort']:,} of {one['users']:,} clients a round, {one['items']:,} items"
        yield Row("embedding", shape, "-", f"{one['ours_s']:.2f} a round", f"{one['peak_gb']:.2f} (GB)", remark)


def quantized(bench: Bench, backbone: T5ForConditionalGeneration) -> Iterator[Row]:
    """Local training of one client on a base in full precision, 4 and 8 bits, after an evaluation."""
    if find_spec("bitsandbytes") is None:
        yield Row("quantized", "LoRA, nf4 and int8", "-", "-", "-", "bitsandbytes is not installed")
        return
    size, task = bench.size, first_users(bench.clients[0], bench.size.fusion_users, bench)
    settings = LocalTraining(local_epochs=size.fusion_epochs, batch_size=size.batch_sizes[0], precision="bf16")
    ranking = RankingConfig(num_beams=size.num_beams, eval_batch_size=size.decode_batches[-1])
    with tempfile.TemporaryDirectory() as folder:
        backbone.save_pretrained(folder)
        for quantize in get_args(Quantize):
            reset_memory(bench.device)
            frozen = load_backbone(folder, range(size.vocab_size), quantize, bench.device)  # as many tokens as rows
            model = attach_lora(frozen, LoraSettings(rank=size.lora_rank))
            base = Base(model, bench.tokenizer, RankingContext(ranking, device=bench.device))
            models = client_models(base, [task], settings, seed=0)
            before = base_hash(model)
            models.student(task.name).positions("valid")
            log = train_locally(models, 0, 1, models.start).log
            assert base_hash(model) == before, "training changed the frozen backbone"
            assert log["finite"], "an adapter is not finite"
            assert log["loss"] < log["first_loss"], f"the loss does not fall, {log['first_loss']} to {log['loss']}"
            factors = named_factors(model).items()
            assert all(bool(factor.any()) for name, factor in factors if name.endswith("lora_b")), "no gradients"
            per_s = f"{size.fusion_epochs * models.clients[0].num_examples / log['seconds']:,.0f} samples"
            remark = f"loss {log['first_loss']:.3f} to {log['loss']:.3f}; peak with loading and validation"
            what = f"LoRA, base {quantize}, bf16, batch {size.batch_sizes[0]}"
            yield Row("quantized", what, per_s, f"{log['seconds']:.1f}", peak_memory(bench), remark)


def deepspeed_runs() -> Iterator[Row]:
    """One federated round on the embedded sample by the plain loop, and through ZeRO-2 and ZeRO-3, in one process."""
    if find_spec("deepspeed") is None:
        yield Row("deepspeed", "ZeRO-2 and ZeRO-3", "-", "-", "-", "deepspeed is not installed")
        return
    script, losses = str(REPOSITORY / "scripts" / "federate.py"), {}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "zero2", "zero3"):
            config = str(REPOSITORY / "configs" / "deepspeed" / f"{name}.json")
            words = [] if name == "plain" else ["--use_deepspeed", "--deepspeed_config_file", config]
            run = ["--num_rounds", "1", "--output", f"{folder}/{name}", "--cache", f"{folder}/cache"]
            done = call([*launcher, *words, script, "--domains", "crime,comics", *run], RUN_S)
            assert done.returncode == 0, f"{name}: exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
            (record,) = (json.loads(line) for line in Path(folder, name, "rounds.jsonl").read_text().splitlines())
            losses[name] = np.array([client["loss"] for client in record["clients"]])
            away = float(np.abs(losses[name] / losses["plain"] - 1).max())
            assert away < 1e-3, f"{name}: losses {losses[name]}, plain {losses['plain']}"
            remark = f"losses {100 * away:.4f} % away from the plain loop"
            yield Row("deepspeed", f"one round, {name}", "-", f"{record['train_s']:.1f}", "-", remark)


def federated_run(data: str, config: str, options: str) -> Iterator[Row]:
    """scripts/federate.py on prepared data; the test result of each domain goes into the remark."""
    if not data:
        yield Row("run", "scripts/federate.py", "-", "-", "-", "not asked for (no --data)")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [*(("--config", config) if config else ()), "--data", data, *shlex.split(options)]
        started = time.perf_counter()
        command = [sys.executable, str(REPOSITORY / "scripts" / "federate.py"), *words, "--output", f"{folder}/run"]
        done = call([*command, "--cache", f"{folder}/cache"], RUN_S)
        print(done.stdout[-6000:])
        assert done.returncode == 0, f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
        metrics = json.loads(Path(folder, "run", "metrics.json").read_text())
        rounds = [json.loads(line) for line in Path(folder, "run", "rounds.jsonl").read_text().splitlines()]
        found = {name: one["test"][metrics["reported"]]["hit@10"]["mean"] for name, one in metrics["domains"].items()}
        hits = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        train_s = sum(record["train_s"] for record in rounds)
        remark = f"test hit@10: {hits}; {len(rounds)} rounds, {train_s:.1f} s of local training"
        what = f"scripts/federate.py --config {Path(config).name or '(none)'} --data DATA {options}".strip()
        yield Row("run", what, "-", f"{time.perf_counter() - started:.1f}", "-", remark)


def call(command: list[str], limit_s: int) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=limit_s)


def reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(bench: Bench) -> str:
    """GiB that tensors took on the GPU since the last reset; on a CPU the peak of the whole process so far."""
    if bench.device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(bench.device) / 2**30:.2f}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} (process)"


def heading(size: Size, device: torch.device, commit: str) -> list[str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return [
        "# GPU programme",
        "",
        *provenance.heading("gpu.py", torch.get_num_threads(), commit),
        f"- GPU: {name}",
        f"- Sizes: {json.dumps(size._asdict())}",
        "",
        "Each row was timed after the assertions of its part: the loss is finite and falls, the frozen backbone stays,",
        "directions have unit norm, lists hold different items of the catalogue, bf16 and fp32 agree. Random weights",
        "and synthetic users: speeds, not quality.",
        "",
        "| part | what | per second | seconds | peak memory, GiB | remark |",
        "|---|---|---|---|---|---|",
    ]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to do, default all")
    parser.add_argument("--shapes", default="24516-clients,ml-1m", help="cross-device track; ml-1m needs its data")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--tests", nargs="+", default=[], help="where pytest looks, default: files with gpu tests")
    parser.add_argument("--data", default="", help="folder of prepared domains for the federated run")
    parser.add_argument("--config", default="", help="YAML file of the federated run")
    parser.add_argument("--options", default="", help="further options of the federated run, in one quoted string")
    parser.add_argument("--commit", default="", help="what to write as commit where there is no git checkout")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file to write")
    arguments = parser.parse_args(argv)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = TOY if arguments.toy else PAPER
    lines = heading(size, device, arguments.commit)
    started, failed = time.perf_counter(), False
    kept: dict[str, Any] = {}

    def log(row: Row) -> None:
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |")
        print(lines[-1], flush=True)
        if arguments.output is not None:  # after every row, so that a killed command leaves what it found
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text("\n".join(lines) + "\n")

    def do(part: str, work: Callable[[], Iterator[Any]]) -> None:
        nonlocal failed
        try:
            for found in work():
                if isinstance(found, Row):
                    log(found)
                else:
                    kept["backbone"] = found
        except Exception as error:  # the other parts are worth having all the same
            failed = True
            log(Row(part, "FAILED", "-", "-", "-", f"{type(error).__name__}: {error}"[:400]))

    parts = set(arguments.parts)
    if "tests" in parts:
        do("tests", lambda: gpu_tests(arguments.tests))
    if parts & {"training", "fusion", "decode", "quantized"}:
        bench = make_bench(size, device)
        do("training", lambda: training(bench))
        for part, work in (("fusion", fusion), ("decode", decode), ("quantized", quantized)):
            if part in parts and "backbone" in kept:
                do(part, lambda work=work: work(bench, kept["backbone"]))
    if "embedding" in parts:
        do("embedding", lambda: embedding_shapes(device, "toy" if arguments.toy else arguments.shapes))
    if "deepspeed" in parts:
        do("deepspeed", deepspeed_runs)
    if "run" in parts:
        do("run", lambda: federated_run(arguments.data, arguments.config, arguments.options))
    print(f"{time.perf_counter() - started:.0f} s in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
