"""The page of a finished run.

Shape legend: K clients (domains), E experts, R rounds, M adapted modules, U users of a domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedecider.audit.attacks import audit_section
from fedecider.cross_silo.entries import LOCAL, STUDENT, run_conclusion, selection_text
from fedecider.cross_silo.prepare import load_data
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.domain import Domain, clients_of
from fedecider.data.encoders import load_encoder
from fedecider.engine.page import (
    CARDS_FILE,
    EXAMPLES_FILE,
    Parts,
    ReportConfig,
    RunFiles,
    canary_score,
    damage_is_bad_input,
    page_colours,
    read_files,
    write_run_page,
)
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.per_user import UserPositions, read_per_user
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.record import plain, read_json, read_records, write_json
from fedecider.federation.streams import stream
from fedecider.methods.entries import METHODS
from fedecider.methods.recommender import travelling_shapes
from fedecider.models.adapters import AdapterShape
from fedecider.models.folders import read_llm_run
from fedecider.models.item_table import WEIGHTS_FILE
from fedecider.models.item_texts import TEXT_ENCODER
from fedecider.report.analyses import (
    MAX_TEXTS,
    activity_table,
    boundary_shock,
    cost_of_joining,
    distance_correlation,
    domain_distances,
    logged_rows,
    newest_titles,
    popularity_table,
    sample_texts,
    timing,
    traffic_table,
)
from fedecider.report.analysis_sections import fusion_section, sections_of
from fedecider.report.figures import expert_heat_map
from fedecider.report.page import Conclusion, PageTable, Section
from fedecider.report.tables import (
    CANARY,
    number_text,
)
from fedecider.report.verdict import joining_rows, without_rows
from fedecider.running.progress import log_line
from fedecider.running.run_folder import SITE, RunFolder, damage_names, read_metrics, read_run

# The hybrids of a run as a section of its page, from its JSON files alone.

WORDS = (
    "p(item | history) is a sum of the probabilities that experts give, weighted by how well each would have found the "
    "client's train events, every user being left out of what is counted. Counts: what stood near the newest items "
    "with other users. Text: items with near texts. Agreement: what both of these find likely. Model: the client's "
    "own model, weighted on users whom its adapters have not seen. Uniform: all items alike. Where the model "
    "alone, or the hybrid without a model, ranked the client's validation items clearly better, its weights were "
    "taken. The weights and counts of a client stay with it; they are in one place here, which only a simulation has."
)


def hybrid_section(metrics: Mapping[str, Any], communication: Mapping[str, Any]) -> list[Section]:
    """Weights of the experts of every client; nothing for a run without hybrids."""
    if "hybrid" not in metrics:
        return []
    fitted = {name: one["beside_model"] for name, one in metrics["hybrid"].items()}
    experts = next(iter(fitted.values()))["experts"]
    weight_KE = torch.tensor([one["mean_E"] for one in fitted.values()], dtype=torch.float64)
    rows = [
        [
            name,
            f"{one['num_contexts']:,}",
            f"{one['log_likelihood']:.3f}",
            metrics["hybrid"][name].get("choice", {}).get("weights", "mixture"),
            *_bytes(communication.get("hybrid", {}).get(name)),
        ]
        for name, one in fitted.items()
    ]
    header = ("client", "train events", "mean log-probability", "weights of", "bytes down", "bytes up")
    caption = "On what the weights were fitted, and the secure sum of counts where clients share a catalogue"
    figure = expert_heat_map(weight_KE, list(fitted), experts)
    return [Section("Hybrid", [WORDS], [PageTable(header, rows, caption)], [figure])]


def _bytes(traffic: Mapping[str, int] | None) -> list[str]:
    return ["-", "-"] if traffic is None else [f"{traffic[way]:,}" for way in ("down", "up")]


def joining_section(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[Section]:
    """What joining brought to each client, and what clients have in common; nothing for a run of before."""
    overlap, joining, tables = record.get("overlap", {}), metrics.get("joining", {}), []
    if joining:
        header = ("client", "customers", "alone", "joined", "difference", "Holm p", "keeps")
        scopes = {name: one["test"] for name, one in [*metrics["domains"].items(), (MACRO, metrics.get(MACRO))] if one}
        caption = "Of 100 customers, those who find their next purchase among the ten recommended (hit@10)"
        tables.append(PageTable(header, joining_rows(joining, scopes), caption))
    if without := metrics.get("without"):
        names = [*metrics["domains"], MACRO]
        caption = (
            "Who gains from whom: of 100 customers so many more find their next purchase when the company of the line "
            "is left out; * beyond chance"
        )
        tables.append(PageTable(("without", *names), without_rows(without, names), caption))
    if pairs := overlap.get("pairs"):
        columns = ("client", "other", "common items", "of all items", "of its sales", "of the other's sales")
        rows = [
            [
                *(one["first"], one["second"], f"{one['num_items']:,}"),
                *map(_share, (one["item_share"], *one["event_share"])),
            ]
            for one in pairs
        ]
        tables.append(PageTable(columns, rows, "What clients have in common, before training"))
    if not tables:
        return []
    return [Section("Joining", list(overlap.get("sentences", [])), tables)]


# A few real histories with recommendations: a first section for the top of a page, and one with the rest of them.

Examples = Mapping[str, Sequence[Mapping[str, Any]]]
"""Domain -> examples, as ``examples.json`` has them."""
FIRST = 3
"""So many stand before the tables."""


def example_sections(per_row: Mapping[str, Examples]) -> tuple[list[Section], list[Section]]:
    """The first examples, and those for further down; both empty where there are none.

    ``per_row``: row -> its examples; the rows have the same users, drawn by the seed.
    """
    given = {label: examples for label, examples in per_row.items() if examples}
    by_domain = [
        [
            _table({label: examples[name][number] for label, examples in given.items()}, f"{name}, user {number + 1}")
            for number in range(len(found))
        ]
        for name, found in next(iter(given.values()), {}).items()
    ]
    tables = [table for table in chain(*zip_longest(*by_domain)) if table is not None]
    if not tables:
        return [], []
    text = (
        "Users drawn at random before anything was decoded: what they had last, the oldest first, and what was "
        f"recommended by {' and '.join(given)}, the best first. ✓ marks the held-out item, which the user took next. "
        "These are real histories, without user keys; think before you publish them."
    )
    more = f"As in the section Examples: {len(tables) - FIRST} more users."
    rest = [Section("More examples", [more], tables[FIRST:])] if tables[FIRST:] else []
    return [Section("Examples", [text], tables[:FIRST])], rest


def _table(examples: Mapping[str, Mapping[str, Any]], name: str) -> PageTable:
    first = next(iter(examples.values()))
    found = {label: _place(example["position"]) for label, example in examples.items()}
    said = "; ".join(f"{label}: {place}" if len(found) > 1 else place for label, place in found.items())
    older = first["num_history"] - len(first["history"])
    had = f"had (and {older} before)" if older else "had"
    lists = [[_title(item) for item in example["recommended"]] for example in examples.values()]
    columns = zip_longest(first["history"], *lists, fillvalue="")
    rows = [[str(number), *cells] for number, cells in enumerate(columns, 1)]
    labels = ["recommended"] if len(examples) == 1 else [f"recommended by {label}" for label in examples]
    return PageTable(("no.", had, *labels), rows, f"{name} took “{first['held_out']}” next: {said}")


def _place(position: int | None) -> str:
    return "not among the returned items" if position is None else f"found at place {position + 1}"


def _title(item: Mapping[str, Any]) -> str:
    return f"✓ {item['title']}" if item["held_out"] else item["title"]


# What a reader of a run's numbers must know first: leaks, ties, empty groups, refused updates, untrained modules.

SHOWN = 10
"""Places of the longest list that a table shows."""
TIED = 0.01
"""Share of users with equal times on their last two events from which on it is said."""


def run_warnings(
    record: Mapping[str, Any],
    metrics: Mapping[str, Any],
    rounds: Sequence[Mapping[str, Any]],
    cards: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """All warnings of a finished run but those of the canary, the most serious first; empty when there is none."""
    pool = bool(record["config"]["run"].get("public_domains"))  # runs before there was the choice have none
    return [
        *_protocol(metrics),
        *_clients(rounds, list(metrics["domains"])),
        *_ties(
            {name: cards[name]["clients"].get("tied_last_two_share") for name in metrics["domains"] if name in cards}
        ),
        *(warning for name in metrics["domains"] if name in cards for warning in _data(name, cards[name], pool)),
        *(warning for name in metrics["domains"] if name in cards for warning in _beams(name, cards[name], metrics)),
        *_origin(record, metrics, rounds),
    ]


def canary_alarms(metrics: Mapping[str, Any]) -> list[str]:
    """Domains in which the canary is above chance, where it should not be."""
    protocol = get_protocol(metrics["protocol"])
    if protocol.leaks or not protocol.drop_seen:
        return []  # it leaks anyway; or the memoriser knows what the user had before, which is then a candidate
    return [
        f"{name}: the memoriser, which knows nothing about items, is above chance (hit@10 "
        f"{domain['test'][CANARY]['hit@10']['mean']:.4f}, chance {domain['chance_hit@10']:.4f}): "
        "by luck, or the evaluation leaks"
        for name, domain in metrics["domains"].items()
        if _ran(domain) and domain["test"][CANARY]["hit@10"]["low"] > domain["chance_hit@10"]
    ]


def _protocol(metrics: Mapping[str, Any]) -> list[str]:
    protocol = get_protocol(metrics["protocol"])
    return [stamp(protocol, canary_score(metrics))] if protocol.leaks else []


def _clients(rounds: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    refused: dict[str, list[int]] = {}
    untrained: dict[str, int] = {}
    for record in rounds:
        for client in record["clients"]:
            name = names[client["client"]]
            if client.get("finite") is False:
                refused.setdefault(name, []).append(record["round"])
            if client.get("num_untrained") is not None:
                untrained[name] = client["num_untrained"]  # the newest count stands
    return [
        *(
            f"{name}: the update was not finite and was refused in round {', '.join(map(str, rounds))}; the client "
            "kept what it had"
            for name, rounds in refused.items()
        ),
        *(
            f"{name}: {count} adapted modules were still untrained (norm of the update below 1e-8) when it last took "
            "part"
            for name, count in untrained.items()
            if count
        ),
    ]


def _ties(shares: Mapping[str, float | None]) -> list[str]:
    tied = {name: share for name, share in shares.items() if share is not None and share >= TIED}
    if not tied:
        return []
    found = ", ".join(f"{share:.1%}" for share in tied.values())
    return [
        f"{', '.join(tied)}: the last two events of {found} of the users "
        "have the same time, so it is arbitrary which of the two is the test item"
    ]


def _data(name: str, card: Mapping[str, Any], foreign_pool: bool) -> list[str]:
    clients, found = card["clients"], []
    if clients.get("timestamps") == "unknown":
        found.append(f"{name}: no event has a time, so the order of the file decides which item is held out")
    if clients.get("repeated_test_item_share"):
        found.append(
            f"{name}: {clients['repeated_test_item_share']:.1%} of the users had their test item before; where seen "
            "items are dropped, no method can find it"
        )
    for group in ("clients",) if foreign_pool else ("clients", "public"):
        if card[group]["users"] == 0:
            found.append(f"{name}: the group of {group} users is empty")
    return found


def _beams(name: str, card: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    """Beams are searched before items of the history are dropped: long histories leave too few to rank. No beams are
    searched where every item is scored."""
    median, beams = card["clients"].get("length", {}).get("median"), metrics["num_beams"]
    if beams is None or median is None or not get_protocol(metrics["protocol"]).drop_seen or median + SHOWN <= beams:
        return []
    return [
        f"{name}: half of the users have {median:g} events or more, whose items may take places among the {beams} "
        f"beams, so rows of models may be too low: give num_beams {int(median) + SHOWN} or more, at most the catalogue"
    ]


def _origin(record: Mapping[str, Any], metrics: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    found, commit = [], record.get("commit")
    if len(rounds) > 1 and metrics["best_round"] == rounds[-1]["round"]:
        found.append("the last round is the best on validation: the run may not have converged")
    if commit is None:
        found.append("the commit is not known: the code was run outside a checkout")
    elif commit.endswith("-dirty"):
        found.append("the code differed from its commit: this run cannot be repeated from the commit alone")
    return found


def _ran(domain: Mapping[str, Any]) -> bool:
    return CANARY in domain["test"]


# ``report.html`` of a run folder: read from its JSON files alone, so that it can be made again anywhere.


def run_page(folder: RunFolder, extra: Sequence[Section] = (), warnings: Sequence[str] = ()) -> Path:
    """Write ``report.html`` into a finished run folder of the cross-silo track and return its path.

    ``extra`` sections stand after examples, results, convergence and fusion weights, ``warnings`` after those of the
    run itself; errors as `fedecider.engine.page.write_run_page`, and ``ValueError`` for a run of another track.
    """

    def parts(files: RunFiles) -> Parts:
        first_examples, more_examples = example_sections({files.metrics["reported"]: files.examples})
        joining = joining_section(files.record, files.metrics)
        return Parts(
            _conclusion(files),
            [f"Text neighbours: item texts as vectors of {one}." for one in [files.metrics.get("text_encoder")] if one],
            [*joining, *first_examples],
            [
                *fusion_section(files.weights, files.metrics["best_round"]),
                *hybrid_section(files.metrics, files.communication),
                *audit_section(files.audit),
                *extra,
            ],
            [*more_examples, *id_section(files.metrics), *_data_run_page(files), *_run(files)],
            [*run_warnings(files.record, files.metrics, files.rounds, files.cards), *warnings],
        )

    read_llm_run(folder.root)
    return write_run_page(folder, parts)


def conclusion_of(folder: RunFolder) -> Conclusion:
    """The first words of the page of a finished run; errors as `run_page`."""
    files = read_files(folder)
    with damage_is_bad_input(folder):
        return _conclusion(files)


def _conclusion(files: RunFiles) -> Conclusion:
    names, alarms = list(files.metrics["domains"]), canary_alarms(files.metrics)
    everyone = files.record.get(SITE, {}).get("clients", names)
    cost = cost_of_joining(files.logs, everyone, names) if "joining" in files.metrics else None
    return run_conclusion(files.record, files.metrics, len(files.logs), alarms, files.cards, cost)


def _run(files: RunFiles) -> list[Section]:
    config, run, choice = files.record["config"], files.record["config"]["run"], files.selection
    taken = {**run, **config["training"], **choice.get("taken", {})}
    rows = [
        ("method", files.metrics["method"]),
        *[("backbone", told) for told in [files.metrics.get("backbone")] if told],
        ("domains (clients)", ", ".join(files.metrics["domains"])),
        ("rounds", f"{len(files.logs)}, reported is round {files.metrics['best_round']}"),
        ("participation", f"{run['participation']:.0%} of the clients in a round"),
        ("local epochs", f"{taken['local_epochs']} in a round"),
        ("learning rate", f"{taken['learning_rate']:g}"),
        ("adapted layers", taken["lora_targets"]),
        *([("tried before the rounds", selection_text(**choice))] if choice else []),
        ("LoRA rank", str(run["lora_rank"])),
        ("seed", str(run["seed"])),
        ("decoding", _decoding(files.metrics)),
        ("protocol", files.metrics["protocol"]),
    ]
    return [Section("What was run", tables=[PageTable(("setting", "value"), rows)])]


def id_section(metrics: Mapping[str, Any]) -> list[Section]:
    """What the item IDs are like, by domain, and examples; nothing of runs that do not tell it."""
    reports = {name: one["item_ids"] for name, one in metrics["domains"].items() if one.get("item_ids")}
    if not reports:
        return []
    header = (
        "domain",
        "item IDs",
        "words from the item's text",
        "IDs with a word twice",
        "collisions before",
        "after",
        "suffixes",
        "words (most)",
        "tokens (most)",
        "of a category with one first word",
    )
    rows, examples = [], []
    for name, one in reports.items():
        numbers = (f"{one[key]:,}" for key in ("num_collisions", "num_collisions_left", "num_suffixes"))
        lengths = (f"{one[f'mean_{kind}']:.1f} ({one[f'max_{kind}']})" for kind in ("words", "tokens"))
        shares = (_share(one.get("own_word_share")), _share(one.get("repeat_share")))
        category = _share(one.get("category_share"))
        rows.append([name, f"{one['num_items']:,}", *shares, *numbers, *lengths, category])
        examples += [(name, title, text) for title, text in one.get("examples", [])]
    paragraph = (
        "A collision is an item whose first choice another item has; it gets another ID of its own words, or where "
        "there is none a suffix, which is no word of its text."
    )
    tables = [PageTable(header, rows)]
    if examples:
        tables.append(PageTable(("domain", "title", "item ID"), examples, "Examples of item IDs"))
    return [Section("Item IDs", [paragraph], tables)]


def _decoding(metrics: Mapping[str, Any]) -> str:
    if metrics["num_beams"] is None:
        return "every item is scored, as its ID is one token"
    return f"{metrics['num_beams']} beams"


def _data_run_page(files: RunFiles) -> list[Section]:
    if not files.cards:
        return []
    header = (
        "domain",
        "items",
        "users",
        "events",
        "mean length",
        "last two tied",
        "test item had before",
        "public users",
    )
    rows = []
    for name, card in files.cards.items():
        clients = card["clients"]
        counts = (f"{value:,}" for value in (card["items"]["count"], clients["users"], clients["events"]))
        mean = number_text(clients["length"]["mean"] if "length" in clients else None, 1)
        shares = (_share(clients.get(key)) for key in ("tied_last_two_share", "repeated_test_item_share"))
        rows.append([name, *counts, mean, *shares, f"{card['public']['users']:,}"])
    paragraph = (
        "Users are the private users of the client; the last event of each is the test item, the last but one the "
        "validation item. Public users are those of the shared pre-training; none of them is a client."
    )
    return [Section("Data", [paragraph], [PageTable(header, rows)])]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# All analyses of one finished run as plain data: what ``analysis.json`` holds and the report's sections are made
# of.

TEXTUAL_IDS, NEWEST_TITLES = "textual user IDs", "joined titles of the newest train items"


def run_analysis(
    folder: RunFolder,
    domains: Mapping[str, Domain],
    user_texts: Mapping[str, Sequence[str]],
    encoder: str = "auto",
    compare: RunFolder | None = None,
    max_texts: int = MAX_TEXTS,
) -> dict[str, Any]:
    """Every number of the analyses as strict JSON data; parts that do not apply to the method are None.

    Args:
        folder: A finished run.
        domains: The run's domains in client order.
        user_texts: Domain -> textual IDs of its client users; titles stand in for all when a domain has none.
        encoder: See ``encoders.load_encoder``.
        compare: Another run on the same users whose reported row stands beside; None: the student without adapters.
        max_texts: Texts encoded per domain.

    Raises:
        ValueError: the domains are not those of the run, or ``compare`` ranked other users.
    """
    metrics, record, records = read_metrics(folder), read_run(folder.root), read_records(folder.rounds)
    METHODS.check_recorded(record["config"], str(folder.record))
    names, selected = list(domains), metrics["best_round"]
    if names != list(metrics["domains"]):
        raise ValueError(f"got domains {names}, expected those of the run in its order: {list(metrics['domains'])}")
    positions = _positions(folder, domains, metrics["reported"], compare)
    shapes = run_shapes(folder, names[0], record["config"]["run"]["lora_rank"])
    common = read_json(folder.communication).get("common_rows", [])  # runs of before sent whole tables

    def scalars(client: int, round: int) -> tuple[int, int]:
        own, peers = travelling_shapes(shapes, common, client, len(names))
        asked = LOCAL if metrics["method"] == LOCAL else record["config"]["run"]["method"]
        return METHODS[asked].scalars(own, peers, round)

    chosen = next((entry for entry in records if entry["round"] == selected), None)
    if chosen is None:
        raise ValueError(f"got no record of the selected round {selected} in {folder.rounds}, expected one")
    alpha = read_json(folder.fusion_weights) if folder.fusion_weights.is_file() else None
    analysis = {
        "method": metrics["method"],
        "reported": metrics["reported"],
        "lines": list(positions),
        "domains": names,
        "best_round": selected,
        "alpha": alpha,
        "distances": _distances(domains, user_texts, encoder, max_texts, _selected_alpha(alpha, selected)),
        "activity": activity_table(domains, positions),
        "popularity": popularity_table(domains, positions),
        "traffic": traffic_table(records, names, scalars),
        "timing": timing(records, names),
        "rounds": [{key: entry[key] for key in ("round", "score", "train_s")} for entry in records],
        "modules": list(shapes),
        "norms": logged_rows(chosen, "norms", len(names)),
        "cosine": logged_rows(chosen, "cosine", len(names)),
        "shock": boundary_shock(records, names),
    }
    return plain(analysis)


def run_shapes(folder: RunFolder, domain: str, rank: int) -> dict[str, AdapterShape]:
    """Adapted modules with their sizes, sorted, from the header of an exported adapter.

    The exported rank may be K r; ``rank`` is the one of a single client's pair.
    """
    shapes = {}
    ending = ".lora_A.weight"
    with safe_open(str(folder.adapters / domain / WEIGHTS_FILE), "pt") as file:
        for key in file.keys():  # noqa: SIM118  # no mapping
            if key.endswith(ending):
                module = key.removesuffix(ending)
                in_features = file.get_slice(key).get_shape()[1]
                out_features = file.get_slice(f"{module}.lora_B.weight").get_shape()[0]
                name = module.removeprefix("base_model.model.")
                shapes[name] = AdapterShape(rank, in_features, out_features)
    return dict(sorted(shapes.items()))


def _distances(
    domains: Mapping[str, Domain],
    user_texts: Mapping[str, Sequence[str]],
    encoder: str,
    max_texts: int,
    alpha_KK: Tensor | None,
) -> dict[str, Any] | None:
    """Item and user distances with their correlation to alpha; None for a single domain, or where there is no alpha.

    Encoding the texts is most of a page's time: it is spent only where there are weights to compare with.
    """
    if len(domains) < 2 or alpha_KK is None:
        return None
    named = all(user_texts.get(name) for name in domains)  # one kind of text for all, or the kinds would be compared
    users = {name: user_texts[name] if named else newest_titles(domain) for name, domain in domains.items()}
    items = {name: domain.item_texts for name, domain in domains.items()}
    loaded = load_encoder(encoder)
    found: dict[str, Any] = {
        "encoder": loaded.name,
        "users": TEXTUAL_IDS if named else NEWEST_TITLES,
        "num_texts": {},
        "alpha": alpha_KK,
    }
    own = {"item": {name: domain.catalogue for name, domain in domains.items()}, "user": {name: name for name in users}}
    for kind, texts in (("item", items), ("user", users)):
        streams = {name: stream(0, "analysis", kind, own[kind][name]) for name in texts}  # silos draw the same items
        drawn = {name: sample_texts(all, max_texts, streams[name]) for name, all in texts.items()}
        distance_KK = domain_distances(drawn, loaded)
        found["num_texts"][kind] = {name: len(group) for name, group in drawn.items()}
        found[f"{kind}_distance"] = distance_KK
        found[f"{kind}_correlation"] = distance_correlation(alpha_KK, distance_KK)
    return found


def _selected_alpha(alpha: Mapping[str, Any] | None, selected: int) -> Tensor | None:
    if alpha is None:
        return None
    return torch.tensor(alpha["alpha"][alpha["rounds"].index(selected)], dtype=torch.float64)


def _positions(
    folder: RunFolder, domains: Mapping[str, Domain], reported: str, compare: RunFolder | None
) -> dict[str, dict[str, Tensor]]:
    """The reported row and one to compare it with: label -> domain -> (U,) test positions in the domain's order."""
    own = _test_rows(folder.per_user)
    rows = {reported: own[reported]}
    if compare is not None:
        other = read_json(compare.metrics)["reported"]
        label = other if other != reported else f"{other} of {Path(compare.root).name}"
        rows[label] = _test_rows(compare.per_user)[other]
    elif STUDENT in own:
        rows[STUDENT] = own[STUDENT]
    return {
        label: {name: _in_order(found.get(name), domain.clients.users, label) for name, domain in domains.items()}
        for label, found in rows.items()
    }


def _test_rows(path: Path) -> dict[str, dict[str, UserPositions]]:
    rows: dict[str, dict[str, UserPositions]] = {}
    for record in read_per_user(path):
        if record.split == "test":
            rows.setdefault(record.variant, {})[record.domain] = record
    return rows


def _in_order(record: UserPositions | None, users: Sequence[str], label: str) -> Tensor:
    """Positions in the order of ``users``: files of two runs may hold them in other orders."""
    place = {} if record is None else {user: number for number, user in enumerate(record.users)}
    if record is None or set(place) != set(users):
        raise ValueError(
            f"got test positions of other users for {label} than the {len(users)} of the domain; "
            "expected runs on the same prepared data"
        )
    return record.position_U[torch.tensor([place[user] for user in users])]


# From a run folder to its page: at the end of a run, and later by scripts/report.py.

ANALYSIS_FILE = "analysis.json"
UserTexts = Mapping[str, Sequence[str]]
"""Domain -> textual ID of every client user; domains without any are left out."""


def finish_report(
    folder: RunFolder, domains: Mapping[str, Domain], user_texts: UserTexts, examples: Mapping[str, Any], encoder: str
) -> Path | None:
    """Write examples, data cards, analyses and the page at the end of a run; -> the page.

    ``domains``: of the clients, and of a foreign pool, of which the data cards are shown.
    Analyses that fail are left out, and None is returned when there is no page either: hours of training must not end
    in an error of their report. scripts/report.py says what was wrong.
    """
    write_json(folder.root / EXAMPLES_FILE, examples)
    write_json(folder.root / CARDS_FILE, {name: domain.card for name, domain in domains.items()})
    sections: list[Section] = []
    warnings: list[str] = []
    try:
        sections = _analyse(folder, domains, user_texts, encoder)
    except Exception as error:  # see above: any error
        log_line(f"report without analyses: {error}")
        warnings = ["the analyses could not be made; see scripts/report.py"]
    try:
        return run_page(folder, sections, warnings)
    except Exception as error:
        log_line(f"no report: {error}")
        return None


def report(config: ReportConfig) -> Path:
    """Make the page of a finished run again, from its files and the data; no model of the run is loaded.

    Where the data are gone, the analyses that the run saved are shown as they are.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: the run is not finished or of the cross-device track, or the data are not those of the run.
    """
    folder = RunFolder(Path(config.run))
    record = read_files(folder).record
    with damage_names(folder.record):
        run = record["config"]["run"]
        place, pool = config.data or run["data"], run.get("public_domains", "")  # older runs do not name it
        settings = RunConfig(domains=run["domains"], public_domains=pool, data=place, seed=int(run["seed"]))
    if place and not config.data and not Path(place).is_dir():
        return _without_data(folder)
    domains = load_data(settings)
    changed = [name for name, domain in domains.items() if domain.content_hash() != record["data"].get(name)]
    if changed:
        raise ValueError(
            f"got other data than those of {config.run} for {changed}, expected the same. Give the run's --data"
        )
    write_json(folder.root / CARDS_FILE, {name: domain.card for name, domain in domains.items()})
    return run_page(folder, _analyse(folder, domains, cached_user_texts(record), config.encoder))


def cached_user_texts(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Textual user IDs from the stage in the cache that the run was built on; empty where it is not there any more."""
    run = record["config"]["run"]
    others = {TEXT_ENCODER, *(["faults"] if run.get("faults") else [])}  # their hashes stand among those of the domains
    domains = {name: digest for name, digest in record["data"].items() if name not in others}
    wanted = (run["pretrain"], run["seed"], [list(pair) for pair in domains.items()])
    for path in sorted(Path(run["cache"]).glob("pretrain-*/inputs.json")):
        inputs = read_json(path)
        if (inputs["pretrain"], inputs["seed"], inputs["domains"]) == wanted:
            ids = {name: read_json(path.parent / "ids" / f"{name}.json")["clients"] for name in domains}
            return {name: clients["texts"] for name, clients in ids.items() if clients}
    return {}


def _analyse(folder: RunFolder, domains: Mapping[str, Domain], user_texts: UserTexts, encoder: str) -> list[Section]:
    with damage_is_bad_input(folder):
        if not read_files(folder).rounds:  # a site knows no other client to compare with
            return []
        analysis = run_analysis(folder, clients_of(domains), user_texts, encoder)
        write_json(folder.root / ANALYSIS_FILE, analysis)
        return sections_of(analysis, page_colours(read_files(folder)))


def _without_data(folder: RunFolder) -> Path:
    saved = folder.root / ANALYSIS_FILE
    if saved.is_file():
        with damage_is_bad_input(folder):
            sections = sections_of(read_json(saved), page_colours(read_files(folder)))
        return run_page(folder, sections)
    return run_page(folder, warnings=["no analyses: the data of the run are not where they were; see --data"])
