"""The page of a run of the cross-silo track: what this track adds to the page of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedecider.audit.attacks import audit_section
from fedecider.baselines.counts import EASE, TOO_LARGE
from fedecider.cross_silo.conclusion import run_conclusion, run_evidence, words_of_entries
from fedecider.cross_silo.entries import STUDENT
from fedecider.cross_silo.hyperparameter_selection import selection_text
from fedecider.cross_silo.lists import LISTS, list_sentence
from fedecider.cross_silo.prepare import data_of_run
from fedecider.cross_silo.settings import RunConfig
from fedecider.cross_silo.warnings import run_warnings
from fedecider.data.domain import Domain, clients_of
from fedecider.engine.page import Parts, ReportConfig, page_colours, write_run_page
from fedecider.engine.result import RunResult, damage_is_bad_input
from fedecider.evaluation.beyond import BEST_SELLING, NUM_LISTED
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.protocols import get_protocol
from fedecider.models.ensemble import BOUND
from fedecider.models.features import BOUGHT, FEATURES, HABIT
from fedecider.models.folders import read_llm_run
from fedecider.report.answer import units
from fedecider.report.figures import alpha_slider
from fedecider.report.groups import activity_section, popularity_section
from fedecider.report.joining import joining_rows, without_rows
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import number_text, percent_text, shown_metrics


def run_page(root: Path, result: RunResult, groups: Sequence[Section] = ()) -> Path:
    """Write ``report.html`` into the output directory ``root``; errors as `fedecider.engine.page.write_run_page`."""

    def parts(result: RunResult) -> Parts:
        encoder = result.metrics.get("text_encoder")
        return Parts(
            run_conclusion(result),
            [
                *([f"Text neighbours: {encoder} embeddings of item texts."] if encoder else []),
                *([] if EASE in result.test else [f"{TOO_LARGE[0].upper()}{TOO_LARGE[1:]}."]),
            ],
            [*joining_section(result), *lists_section(result), *example_section({result.reported: result.examples})],
            [
                *fusion_section(result.fusion_weights, result.best_round),
                *beyond_section(result),
                *ensemble_section(result),
                *audit_section(result.audit),
                *groups,
            ],
            [*id_section(result.metrics), *_data(result), *_run(result)],
            run_warnings(result),
            words_of_entries(result.method, result.reported),
        )

    return write_run_page(root, result, parts)


def report(config: ReportConfig) -> Path:
    """Make the page of a finished run again; no model of the run is loaded.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: the run is not finished or of another track, or the data are not those of the run.
    """
    root = Path(config.run)
    read_llm_run(root)
    result = RunResult.read(root)
    if not config.analyses:
        return run_page(root, result)
    if not result.rounds:
        raise ValueError(f"got analyses of {root}, the folder of one company, expected that of a run")
    with damage_is_bad_input(root):
        domains = _data_of(config, result)
        entries = [entry for entry in (result.reported, STUDENT) if entry in result.positions]
        positions = {entry: _in_order(result, entry, domains) for entry in entries}
        asked = (domains, positions, page_colours(result))
        return run_page(root, result, [activity_section(*asked), popularity_section(*asked)])


def _in_order(result: RunResult, entry: str, domains: Mapping[str, Domain]) -> dict[str, Tensor]:
    """Test positions in the order of the domains' users, which may be another one in the file; NaN of the untested."""
    found = {}
    for name, domain in domains.items():
        place = {user: number for number, user in enumerate(result.users[name])}
        rows = result.positions[entry][name]
        rows = torch.cat([rows, torch.full_like(rows[:1], torch.nan)])
        found[name] = rows[torch.tensor([place.get(user, -1) for user in domain.clients.users])]
    return found


def _data_of(config: ReportConfig, result: RunResult) -> dict[str, Domain]:
    run = result.settings["run"]
    pool, place = run.get("public_domains", ""), config.data or run["data"]  # older runs do not name a pool
    names = {"domains": run["domains"], "public_domains": pool, "protocol": run.get("protocol", "auto")}
    data = RunConfig(**names, customer_share=run.get("customer_share", 1.0), data=place, seed=int(run["seed"]))
    return clients_of(data_of_run(data, result.record, config.run))


def fusion_section(weights: Mapping[str, Any] | None, best_round: int) -> list[Section]:
    """The fusion weights of all rounds in one figure, from ``fusion_weights.json``; nothing for methods without."""
    if not weights:
        return []
    text = (
        "Row i is company i, column j the company whose direction it weights: how much each takes from every "
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
        tables.append(PageTable(["company", *names], rows, caption))
    figure = alpha_slider(alpha_RKK, weights["rounds"], names, best_round)
    return [Section("Fusion weights", [text], tables, [figure])]


def _gaps(value: Any) -> Any:
    """Lists with NaN where JSON has null."""
    return [_gaps(entry) for entry in value] if isinstance(value, list) else float("nan") if value is None else value


WORDS = (
    "A recommender adds what the model says of an item to what counts and texts say. The score is a weighted sum of "
    "the logarithms of the values below, each divided by its mean over items. The weights are fitted to the company's "
    "validation items. Where past purchases are not recommended, 'bought before' has the lowest weight there is. In a "
    "deployment, other parties see only sums of counts and weights; a simulation shows all of them."
)
MEANINGS = {
    "model": "probability of the item under the company's model",
    "text": "similarity of the item's text to those of the last purchases",
    "counts": "how often customers bought it together with the last purchases",
    "successors": "how often customers bought it next after the last purchase",
    "followers": "how often customers bought it at any time after an earlier purchase",
    "popularity": "how often it was bought",
    "bought before": "a constant",
    "habit": "share of the customer's own purchases that are this item, or follow the last one",
}
"""Features as the page explains them; the last two score items that the customer bought before, the others the rest."""


def lists_section(result: RunResult) -> list[Section]:
    """What is bought again and what is new, apart; nothing where seen items are dropped."""
    if "lists" not in result.metrics:
        return []
    tables, said, lists = [], [], result.metrics["lists"]
    for name in LISTS:
        of_list = lists.get(name, {"num_customers": {}})
        if nobody := [client for client in result.clients if client not in of_list["num_customers"]]:
            said.append(f"{name.capitalize()}: no test customer of {', '.join(nobody)} has such an item.")
        if name not in lists:
            continue
        values = of_list["values"]
        metrics = shown_metrics(next(iter(values.values()))[MACRO])
        rows = [[entry, *(percent_text(value[MACRO][metric]) for metric in metrics)] for entry, value in values.items()]
        number = sum(of_list["num_customers"].values())
        caption = f"{name}: {number:,} customers have such an item; the last row is the best baseline"
        tables.append(PageTable(("", *metrics), rows, caption))
        said.append(list_sentence(name, of_list))
    words = "Two lists: items that a customer bought before, and all others. Each is tested on its part."
    return [Section("Bought again, and new", [words, *said], tables)]


def beyond_section(result: RunResult) -> list[Section]:
    """What lists show of the catalogue; nothing for a run without ensembles, or of before."""
    beyond = result.metrics.get("beyond", {})
    rows = [[entry, *(f"{of[MACRO][name]:.1%}" for name in ("coverage", "long_tail"))] for entry, of in beyond.items()]
    words = (
        f"Top tens of up to {NUM_LISTED:,} customers per company. Coverage: share of the catalogue ever listed. "
        f"Long tail: share of recommendations outside the best-selling {BEST_SELLING:.0%}. Means over companies; "
        "the last row is the best baseline."
    )
    table = PageTable(("", "coverage", "long tail"), rows)
    return [Section("Catalogue coverage", [words], [table])] if rows else []


def ensemble_section(result: RunResult) -> list[Section]:
    """What decides: the weights of every client; nothing for a run without ensembles."""
    ensembles = result.metrics.get("ensemble")
    if not ensembles:
        return []
    every = {name: weights["beside_model"] for name, weights in ensembles.items()}
    columns = [name for name in FEATURES if any(name in weights["value"] for weights in every.values())]
    rows = []
    for name, weights in every.items():
        cells = [weight_text(weights["value"].get(column), weights["error"].get(column)) for column in columns]
        rows.append([name, f"{weights['num_customers']:,}", *cells])
    caption = f"Weights ± standard errors; {BOUND:g} and -{BOUND:g} are the bounds"
    meanings = [
        [name, "bought before" if name in (BOUGHT, HABIT) else "not bought yet", MEANINGS[name]] for name in columns
    ]
    tables = [PageTable(("name", "used for items", "value of an item"), meanings)]
    tables.append(PageTable(("company", "fitted on", *columns), rows, caption))
    if traffic := result.communication.get("ensemble"):
        sizes = [[name, *(f"{traffic[name][way]:,}" for way in ("down", "up"))] for name in every if name in traffic]
        tables.append(
            PageTable(("company", "received", "sent"), sizes, "Bytes of the counts, of which others see only the sum")
        )
    constant = {name: weights["constant"] for name, weights in every.items() if weights["constant"]}
    said = [f"Left out, the same for every choice: {', '.join(names)} ({name})." for name, names in constant.items()]
    nobody = [name for name, weights in every.items() if not weights["num_customers"]]
    said += (
        [f"No customer of {', '.join(nobody)} has a validation item, so the weights of all companies are used."]
        if nobody
        else []
    )
    return [Section("Ensemble weights", [WORDS, *said], tables)]


def weight_text(value: float | None, error: float | None) -> str:
    """A weight with its standard error."""
    return "-" if value is None else f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


def joining_section(result: RunResult) -> list[Section]:
    """What joining brought to each client, and what clients have in common; nothing for a run of before."""
    overlap, joining, tables = result.record.get("overlap", {}), result.metrics.get("joining", {}), []
    if joining:
        evidence = run_evidence(result)
        header = ("company", "customers", "alone", "together", "gain", "model to use")
        caption = f"Of 100 {units(evidence)[0]}, how many {units(evidence)[1]} ({evidence.lead})"
        tables.append(PageTable(header, joining_rows(evidence, joining), caption))
    if without := result.metrics.get("without"):
        names = [*result.clients, MACRO]
        caption = "Who gains from whom: points that the company of the row gives each other one; * significant"
        if kept := [name for name in result.clients if name not in without]:
            caption += f". Not left out yet: {', '.join(kept)} (fedecider without)"
        tables.append(PageTable(("gives", *names), without_rows(without, names), caption))
    pairs = overlap.get("pairs", ())
    if any(share != 1.0 for pair in pairs for share in pair.get("item_shares", (None,))):  # else the sentence says it
        columns = ("A", "B", "common items", "of A's items", "of B's items", "of A's sales", "of B's sales")
        rows = [
            [pair["first"], pair["second"], f"{pair['num_items']:,}"]
            + [_share(share) for share in (*pair.get("item_shares", (None, None)), *pair["event_share"])]
            for pair in pairs
        ]
        tables.append(PageTable(columns, rows, "What each two companies have in common"))
    if not tables:
        return []
    return [Section("Joining", list(overlap.get("sentences", [])), tables)]


Examples = Mapping[str, Sequence[Mapping[str, Any]]]
"""Domain -> examples, as ``examples.json`` has them."""


def example_section(per_row: Mapping[str, Examples]) -> list[Section]:
    """The examples; empty where there are none.

    ``per_row``: row -> its examples; the rows have the same users, drawn by the seed.
    """
    given = {label: examples for label, examples in per_row.items() if examples}
    by_domain = [
        [
            _table(
                {label: examples[name][number] for label, examples in given.items()}, f"{name}, customer {number + 1}"
            )
            for number in range(len(found))
        ]
        for name, found in next(iter(given.values()), {}).items()
    ]
    tables = [table for table in chain(*zip_longest(*by_domain)) if table is not None]
    if not tables:
        return []
    text = (
        "Random customers of each company: their latest purchases in order of time, and the first ten recommendations. "
        "✓ marks the next purchase, which the model did not see. For a page without these histories, delete "
        "examples.json and run fedecider report."
    )
    return [Section("Examples", [text], tables)]


def _table(examples: Mapping[str, Mapping[str, Any]], name: str) -> PageTable:
    first = next(iter(examples.values()))
    places = {label: _place(example["position"]) for label, example in examples.items()}
    where = "; ".join(f"{label}: {place}" if len(places) > 1 else place for label, place in places.items())
    older = first["num_history"] - len(first["history"])
    had = f"bought (and {older} before)" if older else "bought"
    lists = [[_title(item) for item in example["recommended"]] for example in examples.values()]
    columns = zip_longest(first["history"], *lists, fillvalue="")
    rows = [[str(number), *cells] for number, cells in enumerate(columns, 1)]
    labels = ["recommended"] if len(examples) == 1 else [f"recommended by {label}" for label in examples]
    return PageTable(("no.", had, *labels), rows, f"{name}: next purchase “{first['held_out']}”, {where}")


def _place(position: int | None) -> str:
    return "not recommended" if position is None else f"rank {position + 1}"


def _title(item: Mapping[str, Any]) -> str:
    return f"✓ {item['title']}" if item["held_out"] else item["title"]


NUM_IDS = 5
"""Examples of item IDs of each catalogue."""


def id_section(metrics: Mapping[str, Any]) -> list[Section]:
    """What the item IDs of each catalogue are like, and examples; nothing of runs that have none."""
    catalogues: list[tuple[list[str], Mapping[str, Any]]] = []
    for name, one in metrics["domains"].items():
        if ids := one.get("item_ids"):
            same = next((names for names, other in catalogues if other == ids), None)
            if same is None:
                catalogues.append(([name], ids))
            else:
                same.append(name)
    if all(one["max_tokens"] == 1 for _, one in catalogues):
        return []  # every ID is a token of its own, whatever words it has
    header = (
        "companies",
        "items",
        "words from the item's text",
        "IDs with a word twice",
        "collisions",
        "unresolved",
        "IDs with a suffix",
        "words per ID: mean (most)",
        "tokens per ID: mean (most)",
        "categories with one first word",
    )
    rows, examples = [], []
    for names, one in catalogues:
        numbers = (f"{one[key]:,}" for key in ("num_collisions", "num_collisions_left", "num_suffixes"))
        lengths = (f"{one[f'mean_{kind}']:.1f} ({one[f'max_{kind}']})" for kind in ("words", "tokens"))
        shares = (_share(one.get("own_word_share")), _share(one.get("repeat_share")))
        category = _share(one.get("category_share"))
        rows.append([", ".join(names), f"{one['num_items']:,}", *shares, *numbers, *lengths, category])
        examples += [(", ".join(names), title, text) for title, text in one.get("examples", [])[:NUM_IDS]]
    paragraph = (
        "The model names an item by its ID, a few words. Two items with the same first choice collide: one of them "
        "gets other words of its text or, failing that, a suffix that is not in its text."
    )
    tables = [PageTable(header, rows)]
    if examples:
        tables.append(PageTable(("companies", "title", "item ID"), examples, "Examples of item IDs"))
    return [Section("Item IDs", [paragraph], tables)]


def _run(result: RunResult) -> list[Section]:
    run, selection, beams = result.settings["run"], result.selection, result.metrics["num_beams"]
    trained = {**run, **result.settings["training"], **selection.get("taken", {})}
    backbone = result.metrics.get("backbone")
    rows = [
        ("method", result.method),
        *([("starting model", backbone)] if backbone else []),
        ("companies", ", ".join(result.clients)),
        ("rounds", f"{len(result.logs)} (round {result.best_round} reported)"),
        ("participation", f"{run['participation']:.0%} of the clients in a round"),
        ("local epochs", f"{trained['local_epochs']} in a round"),
        ("learning rate", f"{trained['learning_rate']:g}"),
        ("adapted layers", trained["lora_targets"]),
        *([("tried before the rounds", selection_text(**selection))] if selection else []),
        ("LoRA rank", str(run["lora_rank"])),
        ("seed", str(run["seed"])),
        ("decoding", "every item is scored, as its ID is one token" if beams is None else f"{beams} beams"),
        ("evaluation", "; ".join(result.record.get("why_protocol") or [result.protocol])),
    ]
    return [Section("What was run", tables=[PageTable(("setting", "value"), rows)])]


def _data(result: RunResult) -> list[Section]:
    if not result.cards:
        return []
    what = "basket" if get_protocol(result.protocol).baskets else "event"
    header = (
        "company",
        "items",
        "users",
        "events",
        "events per user",
        "last two at the same time",
        "test item bought before",
        "public users",
    )
    rows = []
    for name, card in result.cards.items():
        clients = card["clients"]
        counts = (f"{value:,}" for value in (card["items"]["count"], clients["users"], clients["events"]))
        mean = number_text(clients["length"]["mean"] if "length" in clients else None, 1)
        shares = (_share(clients.get(key)) for key in ("tied_last_two_share", "repeated_test_item_share"))
        rows.append([name, *counts, mean, *shares, f"{card['public']['users']:,}"])
    paragraph = (
        f"Users are the company's own customers; the last {what} of each is for test, the one before for validation. "
        "Public users train the starting model and are not tested."
    )
    return [Section("Data", [paragraph], [PageTable(header, rows)])]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
