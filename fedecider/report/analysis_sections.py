"""The analyses of one run as sections of the HTML page: plain words first, then tables, then figures.

Shape legend: K clients (domains), M adapted modules, R rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from fedecider.report.analyses import BUCKET_METRICS, evidence_note
from fedecider.report.figures import (
    COLOURS,
    alpha_slider,
    convergence_time,
    cosine_heat_map,
    distance_heat_maps,
    group_bars,
    norm_heat_map,
    shock_curves,
)
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import interval_text, number_text

INTERVALS = "Bars and whiskers: 95 % bootstrap over the users of the group."


def sections_of(analysis: Mapping[str, Any], colours: Mapping[str, str] | None = None) -> list[Section]:
    """The sections of what ``run_analysis`` returned, but for the fusion weights; what does not apply is left out.

    ``colours``: of variants and rows, as the other figures of the page show them.
    """
    colours = colours or {}
    sections = [
        _distances(analysis),
        _activity(analysis, colours),
        _popularity(analysis, colours),
        _shock(analysis, colours),
        _updates(analysis),
        _traffic(analysis),
        _timing(analysis, colours),
    ]
    return [section for section in sections if section is not None]


def fusion_section(weights: Mapping[str, Any] | None, best_round: int) -> list[Section]:
    """The fusion weights of all rounds in one figure, from ``fusion_weights.json``; nothing for methods without."""
    if not weights:
        return []
    text = (
        "Row i is client i, column j the domain whose direction it weights: how much each domain takes from every "
        "other one. Round 1 trains no weights and shows where they start. The slider moves to another round. The "
        "weight of a direction of zeros, which adds nothing, is shown as 0."
    )
    alpha_RKK = torch.as_tensor(_gaps(weights["alpha"]), dtype=torch.float64)
    names, tables = weights["domains"], []
    if "shares" in weights:  # runs of before have none
        rows = [
            [name, *(f"{share:.1%}" for share in share_K)]
            for name, share_K in zip(names, weights["shares"], strict=True)
        ]
        caption = "Shares of what the directions really add to a client's model (weight times size), reported model"
        tables.append(PageTable(["client", *names], rows, caption))
    figure = alpha_slider(alpha_RKK, weights["rounds"], names, best_round)
    return [Section("Fusion weights", [text], tables, [figure])]


def _distances(analysis: Mapping[str, Any]) -> Section | None:
    found = analysis["distances"]
    if found is None:
        return None
    counts = "; ".join(
        f"{kind} texts: " + ", ".join(f"{name} {num}" for name, num in per_domain.items())
        for kind, per_domain in found["num_texts"].items()
    )
    paragraphs = [
        f"Distance of two domains: 1 - cosine between the mean vectors of their texts, encoder {found['encoder']} "
        f"({counts}). Items are read as the ID generator reads them. Users: joined titles of their newest train items; "
        "held-out items are not in these texts. Distances of different encoders cannot be compared. The user texts of "
        "all clients are in one place here, which only a simulation has.",
        "Spearman correlation of off-diagonal fusion weights and distances: negative means that nearer domains get "
        "larger weights.",
        evidence_note(len(analysis["domains"])),
    ]
    tables = [_correlation_table(analysis["domains"], found)]
    figure = distance_heat_maps(found["item_distance"], found["user_distance"], analysis["domains"], found["encoder"])
    return Section("How alike the domains are", paragraphs, tables, [figure])


def _correlation_table(domains: Sequence[str], found: Mapping[str, Any]) -> PageTable:
    kinds = ("item", "user")
    columns = [found[f"{kind}_correlation"] for kind in kinds]
    rows = [[f"row of {name}", *(_signed(column["rows"][k]) for column in columns)] for k, name in enumerate(domains)]
    rows.append(["all off-diagonal entries", *(_signed(column["pooled"]) for column in columns)])
    rows.append(["p-value (all renamings of the clients)", *(number_text(column["p_value"], 3) for column in columns)])
    return PageTable(
        ["alpha against", *(f"{kind} distance" for kind in kinds)],
        rows,
        "Spearman correlations at the selected round",
    )


def _activity(analysis: Mapping[str, Any], colours: Mapping[str, str]) -> Section:
    found, labels = analysis["activity"], analysis["lines"]
    paragraphs = [f"Users of each domain in five equal groups by number of train events, ties by user key. {INTERVALS}"]
    if len(labels) > 1:
        wins = ", ".join(f"{label} {found['wins'][label]}" for label in labels)
        paragraphs.append(
            f"Groups in which a model's mean hit@5 is above: {wins}; equal: {found['ties']}. These counts ignore the "
            "intervals; where those overlap widely a win says little."
        )
    groups, rows = {}, []
    for name, buckets in found["domains"].items():
        groups[name] = {_bucket_label(number, bucket): bucket["lines"] for number, bucket in enumerate(buckets)}
        for number, bucket in enumerate(buckets):
            rows += group_rows([name, str(number + 1), span(bucket["train_events"])], bucket["num_users"], bucket)
    header = ["domain", "group", "train events", "users", "model", *BUCKET_METRICS]
    figure = group_bars(groups, "Test metrics by user activity (1 = fewest train events)", colours=colours)
    return Section("Active and less active users", paragraphs, [PageTable(header, rows, INTERVALS)], [figure])


def _popularity(analysis: Mapping[str, Any], colours: Mapping[str, str]) -> Section:
    found = analysis["popularity"]
    paragraphs = [
        "Test cases by how often their target occurs in the train events of the domain's clients. Shares: the cases "
        "sorted by that count (ties by item key) and cut at 20 % and 80 %. Paper: the distinct targets of all domains "
        "together, the least frequent 2 % of them are inactive. Counts tie massively at the low end, so look at the "
        "counts beside the names."
    ]
    paragraphs += [f"Warning: {warning}." for warning in found["warnings"]]
    tables, figures = [], []
    for kind, title in (("shares", "Shares of the test cases"), ("paper", "The paper's definition")):
        rows = []
        for name, groups in found[kind].items():
            for label, group in groups.items():
                rows += group_rows([name, label, span(group["train_count"])], group["num_cases"], group)
        header = ["domain", "group", "train count of the target", "test cases", "model", *BUCKET_METRICS]
        tables.append(PageTable(header, rows, f"{title}. {INTERVALS}"))
        drawn = {
            name: {label: group["lines"] for label, group in groups.items()} for name, groups in found[kind].items()
        }
        figures.append(
            group_bars(drawn, f"Test metrics by popularity of the target ({title.lower()})", colours=colours)
        )
    return Section("Frequent and rare items", paragraphs, tables, figures)


def _shock(analysis: Mapping[str, Any], colours: Mapping[str, str]) -> Section | None:
    shock = analysis["shock"]
    if shock is None:
        return None
    text = (
        "A broadcast exchanges all clients' directions at once and sets their norms to 1 (variants with raw pairs keep "
        "them), while a client's fusion weights were trained for what it had. The difference of the two curves is what "
        "one broadcast costs or gains before anything is trained; the reported model is the one after the broadcast."
    )
    rows = []
    for place, round in enumerate(shock["rounds"]):
        cells = [
            f"{shock['scores']['pre_upload'][name][place]:.3f} → {shock['scores']['post_broadcast'][name][place]:.3f} "
            f"({shock['change'][name][place]:+.3f})"
            for name in analysis["domains"]
        ]
        rows.append([str(round), *cells])
    caption = f"Validation {shock['metric']} before the upload → after the broadcast (difference)"
    table = PageTable(["round", *analysis["domains"]], rows, caption)
    return Section(
        "What the broadcast does to a client's model",
        [text],
        [table],
        [shock_curves(shock, analysis["best_round"], colours)],
    )


def _updates(analysis: Mapping[str, Any]) -> Section | None:
    names, selected = analysis["domains"], analysis["best_round"]
    figures, paragraphs = [], []
    if analysis["norms"] is not None:
        figures.append(norm_heat_map(analysis["norms"], analysis["modules"], names, selected))
        paragraphs.append(
            "Norms: Frobenius norm of each client's own update per adapted layer as it was trained. They differ "
            "between layers and clients, and normalising removes exactly this."
        )
    if analysis["cosine"] is not None:
        figures.append(cosine_heat_map(analysis["cosine"], names, selected))
        paragraphs.append(
            "Cosines: mean over layers of the cosine between a client's newly trained update and the directions it had "
            "received. The diagonal says how far it turned in one round, the rest how alike the clients' updates are."
        )
    return Section(f"The updates of round {selected}", paragraphs, [], figures) if figures else None


def _traffic(analysis: Mapping[str, Any]) -> Section:
    entries = analysis["traffic"]
    odd = sum(not entry["equal"] for entry in entries)
    verdict = (
        "Measured payload and formula are equal in every round."
        if odd == 0
        else f"Warning: measured payload and formula differ in {odd} of {len(entries)} entries."
    )
    text = (
        "Bytes of one client in one round: what the tensors of a message hold, against the method's formula times 4 "
        f"bytes. The header of the message (names and shapes) stands apart, it is in no formula. {verdict}"
    )
    rows = []
    numbers = ("down", "formula_down", "header_down", "up", "formula_up", "header_up")
    for key, group in groupby(entries, key=lambda entry: (entry["clients"], [entry[name] for name in numbers])):
        rounds = [entry["round"] for entry in group]
        label = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        rows.append([label, ", ".join(key[0]), *(f"{value:,}" for value in key[1])])
    header = ["round", "clients", "down", "formula", "header", "up", "formula", "header"]
    return Section("Measured traffic", [text], [PageTable(header, rows, "Bytes per client and round")])


def _timing(analysis: Mapping[str, Any], colours: Mapping[str, str]) -> Section:
    found, rounds = analysis["timing"], analysis["rounds"]
    near = found["near_round"]
    text = (
        f"The best validation ndcg@10 is {found['best_score']:.3f} in round {found['best_round']}; round {near} is the "
        f"first within {found['tolerance']:.0%} of it. Seconds are those of this machine and of its load at that time."
    )
    rows = [[name, number_text(seconds, 2)] for name, seconds in found["client_s"].items()]
    rows.append(["all clients", number_text(found["train_s"], 2)])
    table = PageTable(["client", "local training a round (s)"], rows, "Mean over the rounds")
    figure = convergence_time(rounds, near, colours.get(analysis["reported"], COLOURS[0]))
    return Section("Time and convergence", [text], [table], [figure])


def group_rows(start: Sequence[str], size: int, group: Mapping[str, Any]) -> list[list[str]]:
    """One row for each model; the group is named in the first one only."""
    return [
        [*(start if number == 0 else [""] * len(start)), str(size) if number == 0 else "", label]
        + [interval_text(metrics[metric], 3) for metric in BUCKET_METRICS]
        for number, (label, metrics) in enumerate(group["lines"].items())
    ]


def _bucket_label(number: int, bucket: Mapping[str, Any]) -> str:
    return f"{number + 1} ({span(bucket['train_events'])})"


def span(bounds: Sequence[int] | None) -> str:
    if bounds is None:
        return "-"
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]} to {bounds[1]}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _gaps(value: Any) -> Any:
    """Lists with NaN where JSON has null."""
    return [_gaps(entry) for entry in value] if isinstance(value, list) else float("nan") if value is None else value
