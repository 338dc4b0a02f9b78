"""Is there anything to gain from the clients' data? Counts and fine-tuning with and without them.

    PYTHONPATH=. python benchmarks/headroom.py --config benchmarks/configs/compare/amazon_t5_runs.yaml --data <prepared>

Counts: co-occurrence of the last ten items from the public pool, from the clients' train parts, from both. Training:
the student's adapters, or all of its weights, on each client's data alone (local) or on all of them (pooled), with the
epoch chosen on validation. What pooled training of all weights does not gain, no federated adapter can.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from provenance import write_lines
from torch import Tensor, nn

from fedecider.baselines.counts import decayed_cooccurrence
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import mean_metrics
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import build_base_artifacts, make_recommender
from fedecider.federation.streams import stream
from fedecider.methods.recommender import ClientModels
from fedecider.models.adapters import adapter_parameters, adapter_shapes, initial_adapters, load_plain
from fedecider.running.launch import start
from fedecider.running.options import run


def counts(domain: Domain) -> dict[str, Tensor]:
    """Test positions of the counting baseline from each part of the data."""
    sequences, num_items, public = domain.clients.sequences, len(domain.item_keys), domain.public.sequences
    found = {"public and clients": decayed_cooccurrence(sequences, num_items, "test", extra=public)}
    found["clients only"] = decayed_cooccurrence(sequences, num_items, "test")
    found["public only"] = _uncounted(sequences, num_items, public)
    return found


def _uncounted(sequences: Sequence[Sequence[int]], num_items: int, public: Sequence[Sequence[int]]) -> Tensor:
    """Each client user is asked alone, so that only its own train part is counted beside the public pool."""
    alone = [decayed_cooccurrence([sequence], num_items, "test", extra=public) for sequence in sequences]
    return torch.cat(alone)


def batches(recommender: ClientModels, clients: Sequence[int], epoch: int) -> Iterator[dict[str, Tensor]]:
    """One epoch over ``clients``, their batches in random order."""
    every = [
        batch
        for client in clients
        for batch in recommender.batches(client, stream(0, "headroom", recommender.names[client], epoch))
    ]
    for index in torch.randperm(len(every), generator=stream(0, "headroom order", epoch)).tolist():
        yield every[index]


def fine_tune(
    recommender: ClientModels, start: dict, clients: Sequence[int], whole: bool, rate: float, epochs: int
) -> dict[int, tuple[float, float, int]]:
    """client -> validation and test ndcg@10 and epoch of the best epoch by validation (epoch 0: untrained)."""
    model = recommender.model
    model.load_state_dict(start)
    own = {id(parameter) for parameter in adapter_parameters(model)}
    for parameter in model.parameters():
        parameter.requires_grad_((id(parameter) in own) != whole)
    trained: list[nn.Parameter] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    best = {client: (*_scores(recommender, client), 0) for client in clients}
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in batches(recommender, clients, epoch):
            loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        model.eval()
        for client in clients:
            valid, test = _scores(recommender, client)
            if valid > best[client][0]:
                best[client] = (valid, test, epoch)
    return best


def _scores(recommender: ClientModels, client: int) -> tuple[float, float]:
    valid, test = (mean_metrics(recommender.positions(client, split), (10,))["ndcg@10"] for split in ("valid", "test"))
    return valid, test


def report(
    words: Sequence[str], rates: Sequence[float], epochs: int, weights: Sequence[str], scopes: Sequence[str]
) -> Iterator[str]:
    settings = parse_settings(__doc__ or "", words)
    launch = start(settings.run.num_threads)
    artifacts = build_base_artifacts(settings.run, launch)
    recommender = make_recommender(settings, artifacts, launch.device)
    yield "| row | " + " | ".join(recommender.names) + " |\n|---|" + "---:|" * recommender.num_clients
    per_domain = [counts(domain) for domain in artifacts.domains.values()]
    for name in per_domain[0]:
        cells = [f"{mean_metrics(one[name], (10,))['ndcg@10']:.4f}" for one in per_domain]
        yield f"| co-occurrence, {name} | " + " | ".join(cells) + " |"
    load_plain(recommender.model, initial_adapters(adapter_shapes(recommender.model), recommender.seed))
    untouched = copy.deepcopy(recommender.model.state_dict())
    everyone = range(recommender.num_clients)
    cells = [f"{_scores(recommender, client)[1]:.4f}" for client in everyone]
    yield "| student | " + " | ".join(cells) + " |"
    for what in weights:
        for scope in scopes:
            for rate in rates:
                groups = [[client] for client in everyone] if scope == "local" else [list(everyone)]
                best: dict[int, tuple[float, float, int]] = {}
                for group in groups:
                    best |= fine_tune(recommender, untouched, group, what == "all", rate, epochs)
                cells = [f"{best[client][1]:.4f} (epoch {best[client][2]})" for client in everyone]
                yield f"| {what} weights, {scope}, rate {rate:g} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1e-3,5e-3")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--weights", default="adapter,all", help="which weights are trained")
    parser.add_argument("--scopes", default="local,pooled")
    parser.add_argument("--output", type=Path, help="Markdown file; lines are appended as they come")
    own, words = parser.parse_known_args()
    rates = [float(rate) for rate in own.rates.split(",")]
    write_lines(report(words, rates, own.epochs, own.weights.split(","), own.scopes.split(",")), own.output)


if __name__ == "__main__":
    sys.exit(run(main))
