"""Does a small decoder that starts as the text-neighbour rule learn on top of it, from public events alone?

    PYTHONPATH=. python benchmarks/small_decoder.py --data <prepared> --domains movies_tv,cds_vinyl,video_games \
      --vectors minilm --output benchmarks/results/DATE-small-decoder.md

One model for all domains, one token an item. It is trained on catalogue walks (item texts alone) and on the histories
of public users; no event of a client is seen. Beside it stand text neighbours, co-occurrence, and both added up. The
seconds are CPU seconds of training alone. No step is chosen: the whole curve is reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from provenance import heading
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from fedecider.baselines.counts import decayed_cooccurrence
from fedecider.baselines.text_neighbours import text_and_count_scores, text_neighbour_scores
from fedecider.data.domain import Domain
from fedecider.data.encoders import load_encoder
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import ScoreUsers, rank_held_out
from fedecider.evaluation.split import history
from fedecider.federation.streams import derive_seed
from fedecider.running.stages import cached_stage
from idgen.backbones import causal
from idgen.backbones.small_decoder import NUM_SPECIAL, PAD, SmallDecoderConfig, build_small_decoder
from idgen.text_vectors import item_vectors
from idgen.training import learning_rate_factor
from idgen.trie import IGNORED_LABEL
from idgen.walks import Neighbours, draw_walks, nearest_items

METRICS = ("hit@10", "ndcg@10")
Scores = dict[str, float]


def encoded_texts(domains: Mapping[str, Domain], name: str, cache: Path) -> dict[str, Tensor]:
    """Domain -> (I, E) vectors of its item texts, encoded once."""

    def build(folder: Path) -> None:
        encode = load_encoder(name).encode
        save_file(
            {domain: encode(data.item_texts).float() for domain, data in domains.items()}, folder / "v.safetensors"
        )

    texts = {domain: data.item_texts for domain, data in domains.items()}
    return load_file(
        cached_stage(cache, "text-vectors", {"encoder": name, "texts": texts}, build).folder / "v.safetensors"
    )


def macro(domains: Mapping[str, Domain], score: Mapping[str, ScoreUsers], split: str) -> Scores:
    """Metrics of the held-out items, mean over domains."""
    found = []
    for name, domain in domains.items():
        sequences, num_items = domain.clients.sequences, len(domain.item_keys)
        found.append(mean_metrics(rank_held_out(score[name], sequences, num_items, split), (10,)))
    return {metric: float(np.mean([one[metric] for one in found])) for metric in METRICS}


def baselines(domains: Mapping[str, Domain], vectors: Mapping[str, Tensor]) -> Iterator[tuple[str, Scores]]:
    """Rules without training, on the test items; counts see the public pool and the clients' train parts."""
    text = {n: text_neighbour_scores(vectors[n], d.clients.sequences, "test") for n, d in domains.items()}
    yield "text neighbours", macro(domains, text, "test")
    counts = [
        mean_metrics(
            decayed_cooccurrence(d.clients.sequences, len(d.item_keys), "test", extra=d.public.sequences), (10,)
        )
        for d in domains.values()
    ]
    yield "decayed co-occurrence", {metric: float(np.mean([one[metric] for one in counts])) for metric in METRICS}
    both = {
        n: text_and_count_scores(vectors[n], d.clients.sequences, "test", d.public.sequences)
        for n, d in domains.items()
    }
    yield "text neighbours + counts", macro(domains, both, "test")


def decoder_scores(model: LlamaForCausalLM, domain: Domain, first: int, split: str, longest: int) -> ScoreUsers:
    """Logits of the domain's items after each user's history; ``first`` is the token of its item 0."""

    def score(user_B: Tensor) -> Tensor:
        histories = [list(history(domain.clients.sequences[user], split))[-longest:] for user in user_B.tolist()]
        batch = padded([[first + item for item in items] for items in histories])
        with torch.no_grad():
            last_BD = causal.start(model, batch["input_ids"], batch["attention_mask"]).first_BD
            return causal.token_logits(model, last_BD)[:, first : first + len(domain.item_keys)]

    return score


def padded(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Tokens padded on the right, and their mask."""
    ids_BT = torch.full((len(rows), max(map(len, rows))), PAD)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row)] = torch.tensor(row)
    return {"input_ids": ids_BT, "attention_mask": (ids_BT != PAD).long()}


def draw_rows(
    domains: Sequence[Domain], near: Sequence[Neighbours], first: Sequence[int], args: argparse.Namespace, rng
) -> tuple[list[list[int]], list[bool]]:
    """One batch as token rows, and which of them are walks, whose last token alone is a target."""
    num_walks = rng.binomial(args.batch_size, args.walk_share)
    rows = []
    for k in rng.integers(len(domains), size=num_walks):
        rows += [[first[k] + item for item in draw_walks(near[k], 1, rng)[0]]]
    users = [(k, s) for k, domain in enumerate(domains) for s in domain.public.sequences if len(s) > 1]
    share = np.array([len(s) - 1 for _, s in users], float)
    for number in rng.choice(len(users), size=args.batch_size - num_walks, p=share / share.sum()):
        k, sequence = users[number]
        begin = int(rng.integers(max(1, len(sequence) - args.max_history)))
        kept = [item for item in sequence[begin : begin + args.max_history + 1] if rng.random() >= args.item_dropout]
        rows.append([first[k] + item for item in (kept if len(kept) > 1 else sequence[begin : begin + 2])])
    return rows, [number < num_walks for number in range(len(rows))]


def train(
    model: LlamaForCausalLM,
    domains: Sequence[Domain],
    near: Sequence[Neighbours],
    first: Sequence[int],
    args: argparse.Namespace,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """AdamW in place; yields (step, CPU seconds of training so far) every ``args.every`` steps."""
    rng = np.random.default_rng(derive_seed(seed, "small decoder"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = argparse.Namespace(warmup_share=0.1, schedule="cosine", final_share=0.0)
    seconds = 0.0
    for step in range(args.steps):
        started = time.process_time()
        rows, is_walk = draw_rows(domains, near, first, args, rng)
        batch = padded(rows)
        label_BT = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED_LABEL)
        label_BT[:, 0] = IGNORED_LABEL
        for number, row in enumerate(rows):
            if is_walk[number]:
                label_BT[number, : len(row) - 1] = IGNORED_LABEL
        counts_BT = label_BT != IGNORED_LABEL
        optimiser.param_groups[0]["lr"] = args.learning_rate * learning_rate_factor(step, args.steps, schedule)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            logit_RV = causal.token_logits(model, causal.target_states(model, batch)[counts_BT])
        loss = F.cross_entropy(logit_RV[:, NUM_SPECIAL:], label_BT[counts_BT] - NUM_SPECIAL)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        seconds += time.process_time() - started
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            yield step + 1, seconds


def measured(model: LlamaForCausalLM, domains: Mapping[str, Domain], first: Sequence[int], longest: int) -> dict:
    """Split -> metrics of the model as it is now."""
    model.eval()
    found = {}
    for split in ("valid", "test"):
        each = zip(domains.items(), first, strict=True)
        scores = {name: decoder_scores(model, domain, token, split, longest) for (name, domain), token in each}
        found[split] = macro(domains, scores, split)
    model.train()
    return found


def learning_curve(
    args: argparse.Namespace, domains: Mapping[str, Domain], start: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[int, float, dict]]:
    """(step, CPU seconds, metrics by split) from the start on."""
    lengths = [len(domain.item_keys) for domain in domains.values()]
    first = [NUM_SPECIAL + sum(lengths[:number]) for number in range(len(lengths))]
    config = SmallDecoderConfig(args.layers, args.heads, args.max_history)
    model = build_small_decoder(torch.cat([start[name] for name in domains]), config, seed)
    yield 0, 0.0, measured(model, domains, first, args.max_history)
    near = [nearest_items(start[name]) for name in domains]
    for step, seconds in train(model, list(domains.values()), near, first, args, seed):
        yield step, seconds, measured(model, domains, first, args.max_history)


def run(args: argparse.Namespace) -> list[str]:
    """The lines of the result file."""
    domains = load_domains(args.data, args.domains.split(","))
    vectors = encoded_texts(domains, args.vectors, Path(args.cache))
    rows = [(label, "", "", "", scores) for label, scores in baselines(domains, vectors)]
    start = item_vectors(vectors, args.width)
    for seed in range(args.seeds):
        for step, seconds, found in learning_curve(args, domains, start, seed):
            print(f"seed {seed}, step {step}, {seconds:.0f} s: {found}", flush=True)
            valid = f"{found['valid']['ndcg@10']:.4f}"
            rows.append((f"small decoder, seed {seed}", str(step), f"{seconds:.0f}", valid, found["test"]))
    sizes = "; ".join(
        f"{name}: {len(domain.clients.users):,} clients, {len(domain.public.users):,} public, "
        f"{len(domain.item_keys):,} items"
        for name, domain in domains.items()
    )
    lines = ["# A small decoder that starts as text neighbours", "", *heading("small_decoder.py", args.threads)]
    lines += [f"- Data: {sizes}", "", "Macro mean over the domains, protocol strict, whole catalogue.", ""]
    lines += ["| row | step | CPU s | valid ndcg@10 | test hit@10 | test ndcg@10 |", "|---|---:|---:|---:|---:|---:|"]
    for label, step, cpu, valid, test in rows:
        lines.append(f"| {label} | {step} | {cpu} | {valid} | {test['hit@10']:.4f} | {test['ndcg@10']:.4f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--domains", required=True)
    parser.add_argument("--vectors", default="auto")
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--max_history", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--walk_share", type=float, default=0.6)
    parser.add_argument("--item_dropout", type=float, default=0.2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = "\n".join(run(args)) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    main()
