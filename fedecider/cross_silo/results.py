"""What came of a run of the cross-silo track: every entry ranked, what each client keeps, figures with intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from torch import Tensor

from fedecider.baselines.counts import EASE, TOO_LARGE, UNTRAINED, train_counts
from fedecider.baselines.own import own_baselines
from fedecider.cross_silo import ensembles, examples
from fedecider.cross_silo import entries as of_entries
from fedecider.cross_silo.base_stages import kept_step
from fedecider.cross_silo.conclusion import run_conclusion, sources_of, subject_of
from fedecider.cross_silo.ended import Ended, Outcome
from fedecider.cross_silo.ensembles import KEPT, Fitting, System, every_ensemble, with_ensemble
from fedecider.cross_silo.entries import Positions
from fedecider.cross_silo.exchange import added_by, communication, fusion_weights
from fedecider.cross_silo.export import export
from fedecider.cross_silo.hyperparameter_selection import selection_text
from fedecider.cross_silo.joining import (
    Keeps,
    checked_events,
    chosen_systems,
    local_system,
    may_choose,
)
from fedecider.cross_silo.lists import beyond_data, list_sentence, lists_data, lists_of
from fedecider.cross_silo.page import run_page
from fedecider.cross_silo.privacy import privacy_data, privacy_notes
from fedecider.cross_silo.reported import Scales, chosen_scale
from fedecider.data.domain import Domain
from fedecider.data.encoders import encoder_label
from fedecider.data.protocol import customers_tested
from fedecider.engine.finish import per_user_records, write, write_page_and_table
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import MACRO, ranked_share
from fedecider.evaluation.protocols import chance_hit, few_candidates, get_protocol, stamp
from fedecider.evaluation.statistics import PerDomain, Persons, compare_table, of_one_run, shared_persons
from fedecider.federation.record import capped_clients, non_finite_uploads, read_records, sum_notes, upload_notes
from fedecider.methods import METHODS
from fedecider.methods.config import LOCAL
from fedecider.models.client_model import ClientModel
from fedecider.models.ensemble import Weights
from fedecider.report import tables
from fedecider.report.conclusion import console_table
from fedecider.report.tables import CANARY, rows_data
from fedecider.running.damage import read_object
from fedecider.running.launch import Launch
from fedecider.running.progress import console, detail, log_line, progress, stage_seconds
from fedecider.running.run_folder import RunFolder, read_run

SPLITS = ("test", "valid")
Entries = dict[str, dict[str, Positions]]
"""Split -> entry -> client -> (U,) positions."""


def write_results(run: Ended, folder: RunFolder, launch: Launch) -> None:
    """Read the test set once, for the selected round, and write every file of the output directory but the record."""
    variants = variant_entries(run)
    if not launch.is_main:
        return
    selection = read_object(folder.selection) if folder.selection.is_file() else {}
    records = read_records(folder.rounds)
    outcome = evaluate(run, variants, RunResult(read_run(folder.root), {}, records, records, selection=selection))
    write_outcome(run, outcome, folder)


def write_outcome(run: Ended, outcome: Outcome, folder: RunFolder) -> None:
    """Export the models, write the files, the page and the table, and say the answer."""
    export(run, outcome, folder)
    seconds = stage_seconds()
    metrics = {**outcome.result.metrics, "notes": _notes(run, outcome.result)}
    result = replace(outcome.result, metrics={**metrics, **({"seconds": seconds} if seconds else {})})
    write(result, folder)
    write_answer(result, folder)


def write_answer(result: RunResult, folder: RunFolder) -> None:
    """The page and the whole table; on the console the few rows that the answer is about, and last the answer."""
    title = f"Test, round {result.best_round} of {len(result.rounds)}"
    write_page_and_table(result, folder, title, result.metrics["notes"], run_page)
    said = run_conclusion(result)
    for note in result.metrics["notes"]:
        detail(note)
    for name, of_list in result.metrics.get("lists", {}).items():
        detail(list_sentence(name, of_list))
    console.print(console_table(said))
    log_line(said.answer.text)


def variant_entries(run: Ended) -> Entries:
    """How the variants of the method rank, without what `evaluate` ranks itself: with an ensemble the reported one."""
    labels = tables.variant_labels(run.method.name, run.method.variants)
    mixes = run.settings.run.ensemble.kind != "none"
    return {
        split: {
            label: {} if mixes and variant == run.method.variants[0] else run.variant(variant, split)
            for variant, label in labels.items()
        }
        for split in SPLITS
    }


def evaluate(run: Ended, variants: Entries, known: RunResult) -> Outcome:
    """Rank everything that stands beside the method, and work out every figure; nothing is written.

    ``variants``: `variant_entries`. ``known``: record, rounds and logs of the run.
    """
    settings, domains = run.settings, run.artifacts.domains
    mixes = settings.run.ensemble.kind != "none"
    texts = of_entries.item_texts_of(settings, run.artifacts, run.models.base.device)
    num_passes, passes = len(domains) * (2 + mixes + (run.alone is not None)), count(1)
    keeps: dict[str, Keeps] = dict.fromkeys(domains, "joined")
    with progress("results") as report:

        def on_ranked(entry: str) -> None:
            report(min(next(passes), num_passes), num_passes, entry)

        fitting = Fitting(settings, run.artifacts, texts, run.others, run.prior, on_ranked)
        scales = {name: chosen_scale(settings, run.joined(name)) for name in domains}
        joined, entries = _joined(run, fitting, variants, scales)
        kept = joined
        if run.alone is not None:
            alone = local_system(fitting, run.alone)
            entries = _with_system(entries, LOCAL, alone, mixes)
            if may_choose(settings):
                keeps, kept = chosen_systems(fitting._replace(on_ranked=of_entries.silent), joined, alone)
            if set(keeps.values()) != {"joined"}:
                entries = _with_system(entries, KEPT, kept, mixes)
        students = of_entries.zero_shot(settings, run.artifacts, run.models, on_ranked=on_ranked)
        rules, rule_lists, ten = of_entries.counting_positions(settings, run.artifacts, texts, SPLITS, on_ranked)
    models = {"test": {**entries["test"], **students}, "valid": entries["valid"]}
    metrics = {**_facts(run, known), **_figures(run, models, rules)}
    if settings.run.share_grid != [1.0]:
        metrics["update_scales"] = dict(scales)
    if kept.ensembles is not None:
        metrics["ensemble"] = ensembles.ensembles_data(kept.ensembles)
        apart = {subject_of(run.method.name, metrics["reported"], models["test"]): kept.apart}
        apart |= {with_ensemble(LOCAL): alone.apart} if run.alone is not None else {}
        shown = {entry: {name: place.ten for name, place in of.items()} for entry, of in apart.items()}
        metrics["beyond"] = beyond_data({**shown, **ten}, rules["test"], _train_events(domains))
        if not get_protocol(settings.run.protocol).drop_seen:
            metrics["lists"] = lists_data(lists_of(apart, rule_lists), list(apart))
    if run.alone is not None:
        events = checked_events(domains, {name: texts[name].unit_ID for name in domains})
        subject = with_ensemble(run.method.name) if mixes else metrics["reported"]
        own = with_ensemble(LOCAL) if mixes else LOCAL
        whole = with_ensemble(KEPT) if mixes else KEPT
        metrics["joining"] = {
            "joined": subject,
            "alone": own,
            "kept": whole if whole in models["test"] else subject,
            "chosen": may_choose(settings),
            "clients": {name: {"num_users": len(of), "keeps": keeps[name]} for name, of in _users(run).items()},
            "events": events,
        }
    fuses = bool(METHODS[settings.run.method].fusion_weights)
    added = added_by(run.models, joined.model_of, domains) if fuses else {}
    traffic = communication(known.rounds, run.models, run.method.takes_mean) if known.rounds else {}
    if kept.ensembles is not None and traffic:
        traffic["ensemble"] = kept.ensembles.traffic
    test = {**models["test"], **rules["test"]}
    per_user = list(per_user_records(test, _users(run), lambda entry: run.rounds.best_round))
    result = replace(
        known,
        metrics=metrics,
        per_user=lambda: per_user,
        communication=traffic,
        fusion_weights=fusion_weights(run, added, known.rounds) if fuses and known.rounds else {},
        cards={name: domain.card for name, domain in run.artifacts.everyone.items()},
        examples={
            name: examples.examples_of(kept.model_of(name), domain, kept.apart.get(name))
            for name, domain in domains.items()
        },
    )
    return Outcome(result, kept, keeps, scales, added)


def weights_by_itself(run: Ended, name: str) -> Weights:
    """What a client tells of its ensemble before it knows the weights of all: a sum of theirs."""
    texts = of_entries.item_texts_of(run.settings, run.artifacts, run.models.base.device)
    model = run.joined(name)
    model = model.scaled(chosen_scale(run.settings, model))
    return ensembles.own_weights(Fitting(run.settings, run.artifacts, texts, run.others), name, model)


def _joined(run: Ended, fitting: Fitting, variants: Entries, scales: Scales) -> tuple[System, Entries]:
    """The joint models with their ensembles, where there are some; and the entries so far."""

    def model_of(name: str) -> ClientModel:
        return run.joined(name).scaled(scales[name])

    reported = next(iter(variants["test"]))
    if run.settings.run.ensemble.kind != "none":
        joint = every_ensemble(fitting, run.method.name, model_of)
    else:
        model = {split: dict(variants[split][reported]) for split in SPLITS}
        for name in (name for name, scale in scales.items() if scale != 1.0):
            for split in SPLITS:
                model[split][name] = model_of(name).positions(split)
        joint = System(model_of, model, model)
    return joint, {split: {**variants[split], reported: joint.model[split], **joint.entries[split]} for split in SPLITS}


def _with_system(entries: Entries, entry: str, system: System, mixes: bool) -> Entries:
    """The entries with those of a further model of the clients, and with its ensembles where there are some."""
    whole = with_ensemble(entry) if mixes else entry
    return {split: {**entries[split], entry: system.model[split], whole: system.whole[split]} for split in SPLITS}


def _train_events(domains: Mapping[str, Domain]) -> dict[str, Tensor]:
    """Of every item: as counts know them."""
    return {
        name: train_counts(domain.clients.sequences, len(domain.item_keys), domain.public.sequences)
        for name, domain in domains.items()
    }


def _users(run: Ended) -> dict[str, Sequence[str]]:
    return {name: customers_tested(domain) for name, domain in run.artifacts.domains.items()}


def _facts(run: Ended, known: RunResult) -> dict[str, Any]:
    settings, protocol = run.settings, get_protocol(run.settings.run.protocol)
    labels = tables.variant_labels(run.method.name, run.method.variants)
    whole = all(client.task.trie.has_own_tokens for client in run.models.clients)
    promised = privacy_data(settings, run.models.num_clients)
    return {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": run.method.name,
        "reported": labels[run.method.variants[0]],
        "best_round": run.rounds.best_round,
        "best_valid_ndcg@10": run.rounds.best_score,
        "num_beams": None if whole else settings.ranking.num_beams,
        "text_encoder": encoder_label(settings.run.pretrain.text_encoder),
        "backbone": kept_step(run.artifacts.pretrained),
        "non_finite_uploads": non_finite_uploads(known.rounds),
        "capped_clients": capped_clients(known.rounds),
        **({"baselines": list(own_baselines())} if own_baselines() else {}),
        **({"privacy": promised} if promised else {}),
    }


def _figures(run: Ended, models: Entries, rules: Entries) -> dict[str, Any]:
    """Of every client and of their mean, on both splits, with paired tests on the test items."""
    protocol, users = get_protocol(run.settings.run.protocol), _users(run)
    own = own_baselines()
    test = of_one_run({**models["test"], **rules["test"]})
    figures = figures_of_entries(test, own, shared_persons(users))
    valid_rows = tables.result_rows(of_one_run(models["valid"]), of_one_run(rules["valid"]))
    found = {
        name: {
            "num_users": len(users[name]),
            "num_items": len(domain.item_keys),
            "item_ids": run.artifacts.ids[name].items.report,
            "chance_hit@10": chance_hit(domain.clients.sequences, len(domain.item_keys), "test", protocol),
            "returned_share": {entry: ranked_share(positions[name]) for entry, positions in models["test"].items()},
            "valid": rows_data(valid_rows, name),
            "test": figures[name],
        }
        for name, domain in run.artifacts.domains.items()
    }
    reported = next(iter(models["test"]))
    return {
        "domains": found,
        **({MACRO: {"test": figures[MACRO]}} if len(found) > 1 else {}),
        "comparisons": paired_tests(run.method.name, reported, test, users),
    }


def figures_of_entries(
    positions: Mapping[str, PerDomain], own: Collection[str], persons: Persons | None
) -> dict[str, dict[str, Any]]:
    """Client (``macro`` for their mean) -> entry -> metric -> mean, low, high. ``positions``: entry -> client ->
    (S, U) or (U,), of baskets (S, U, T), of S training runs."""
    rules = {*UNTRAINED, *own, CANARY}
    models = {label: of for label, of in positions.items() if label not in rules}
    rows = tables.result_rows(models, {label: of for label, of in positions.items() if label in rules}, persons)
    return {name: rows_data(rows, name) for name in rows[0].values}


def paired_tests(
    method: str, reported: str, positions: Mapping[str, PerDomain], users: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """The recommender that is exported against every baseline and what stands beside it, of every client and of
    their mean. ``positions``: as `figures_of_entries` takes them."""
    subject = subject_of(method, reported, positions)
    alone = [label for label in (with_ensemble(LOCAL), LOCAL) if label in positions]
    beside = (*UNTRAINED, *own_baselines(), *sources_of(method, reported), *alone[:1])
    pairs = [(subject, label) for label in dict.fromkeys(beside) if label in positions and label != subject]
    joined = next(label for label in (with_ensemble(method), reported) if label in {*positions, reported})
    pairs += [(joined, alone[0])] if alone and joined != subject else []
    metrics = tables.compared_by(positions)
    return tables.comparisons_data(compare_table(positions, metrics, pairs, persons=shared_persons(users)))


def _notes(run: Ended, result: RunResult) -> list[str]:
    """What must be known before the numbers are read, and how they came about."""
    config, metrics = run.settings.run, result.metrics
    scales = ", ".join(f"{name} {scale:g}" for name, scale in metrics.get("update_scales", {}).items())
    beams = metrics["num_beams"]
    return [
        *few_candidates({name: domain["chance_hit@10"] for name, domain in metrics["domains"].items()}),
        *privacy_notes(metrics.get("privacy", {})),
        *upload_notes(result.rounds, run.models.names),
        *sum_notes(config.secure_sum, config.privacy.clips),
        f"round {result.best_round} of {run.rounds.round} has the best validation ndcg@10 of the variant "
        f"{run.method.variants[0]} ({metrics['best_valid_ndcg@10']:.4f})",
        *([selection_text(**result.selection)] if result.selection else []),
        "every item is scored, as its ID is one token" if beams is None else f"beam search with {beams} beams",
        *([f"share of the trained update, by validation items: {scales}"] if scales else []),
        f"text neighbours: {metrics['text_encoder']} embeddings of item texts",
        *([] if EASE in result.test else [TOO_LARGE]),
    ]
