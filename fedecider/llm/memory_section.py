"""The memories of a run as a section of its page, from its JSON files alone.

Shape legend: K clients (domains), E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedecider.report.figures import expert_heat_map
from fedecider.report.page import PageTable, Section

WORDS = (
    "p(item | history) is a sum of the probabilities that experts give, weighted by how well each would have found the "
    "client's train events, every user being left out of what is counted. Counts: what stood near the newest items "
    "with other users. Text: items with near texts. Agreement: what both of these find likely. Model: the client's "
    "own model, weighted on users whom its adapters have not seen. Uniform: all items alike. Where the model "
    "alone, or the memory alone, ranked the client's validation items clearly better, its weights were taken. The "
    "weights and counts of a client stay with it; they are in one place here, which only a simulation has."
)


def memory_section(metrics: Mapping[str, Any], communication: Mapping[str, Any]) -> list[Section]:
    """Weights of the experts of every client; nothing for a run without memories."""
    if "memory" not in metrics:
        return []
    fitted = {name: one["beside_model"] for name, one in metrics["memory"].items()}
    experts = next(iter(fitted.values()))["experts"]
    weight_KE = torch.tensor([one["mean_E"] for one in fitted.values()], dtype=torch.float64)
    rows = [
        [
            name,
            f"{one['num_contexts']:,}",
            f"{one['log_likelihood']:.3f}",
            metrics["memory"][name].get("choice", {}).get("weights", "mixture"),
            *_bytes(communication["memory"].get(name)),
        ]
        for name, one in fitted.items()
    ]
    header = ("client", "train events", "mean log-probability", "weights of", "bytes down", "bytes up")
    caption = "On what the weights were fitted, and the secure sum of counts where clients share a catalogue"
    figure = expert_heat_map(weight_KE, list(fitted), experts)
    return [Section("Memory", [WORDS], [PageTable(header, rows, caption)], [figure])]


def _bytes(traffic: Mapping[str, int] | None) -> list[str]:
    return ["-", "-"] if traffic is None else [f"{traffic[way]:,}" for way in ("down", "up")]
