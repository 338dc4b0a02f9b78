"""What a finished run leaves behind."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.counts import UNTRAINED
from fedecider.baselines.own import own_baselines
from fedecider.cross_silo.conclusion import joining_lines, run_conclusion, sources_of, subject_of, without_exchange
from fedecider.cross_silo.entries import (
    HYBRID_ROW,
    KEPT,
    LOCAL,
    TEACHER,
    Fitting,
    Hybrids,
    ModelOf,
    Positions,
    counting_positions,
    decode_examples,
    every_hybrid,
    hybrids_data,
    item_texts_of,
    save_hybrids,
    silent,
    with_hybrid,
    zero_shot,
)
from fedecider.cross_silo.hyperparameter_selection import selection_text
from fedecider.cross_silo.joining import (
    Keeps,
    System,
    checked_events,
    chosen_systems,
    joining_data,
    local_system,
    may_choose,
)
from fedecider.cross_silo.page import run_page
from fedecider.cross_silo.prepare import BaseArtifacts, Scales, chosen_scales, kept_step, reported_model
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain
from fedecider.data.encoders import encoder_label
from fedecider.engine.result import CARDS_FILE, EXAMPLES_FILE, RunResult
from fedecider.evaluation.metrics import MACRO, ranked_share
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import chance_hit, few_candidates, get_protocol, stamp
from fedecider.evaluation.statistics import Comparison, compare_table, shared_persons
from fedecider.federation.cohort import hidden_share
from fedecider.federation.config import PrivacyConfig
from fedecider.federation.method import Block, FederatedMethod, Tree
from fedecider.federation.privacy import epsilon, privacy_report
from fedecider.federation.record import (
    capped_clients,
    non_finite_uploads,
    read_json,
    read_records,
    sum_notes,
    upload_notes,
    write_json,
    write_text,
)
from fedecider.federation.rounds import evaluate
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.methods import METHODS
from fedecider.methods.beside import has_local
from fedecider.methods.client_models import ClientModels
from fedecider.methods.entries import FusionWeights
from fedecider.methods.private_training import user_epsilon, user_report
from fedecider.methods.rows import Rows, common_rows, travelling_rows
from fedecider.models.adapters import num_scalars
from fedecider.models.client_model import ClientModel
from fedecider.models.counts import Counts
from fedecider.models.directions import EPSILON
from fedecider.models.export import Card, SavedBase, prompt_layout
from fedecider.models.folders import InferenceConfig, write_inference_config, write_manifest
from fedecider.models.item_table import LOCAL_BACKBONE, ItemTable
from fedecider.models.item_texts import (
    CODEBOOK_FILE,
    PROJECTION_FILE,
    encoded_catalogues,
    encoder_digest,
    save_projection,
)
from fedecider.models.new_items import GENERATOR_FOLDER, TEXT_FOLDER
from fedecider.report.analyses import WAYS, message_bytes, total_bytes
from fedecider.report.joining import KEPT_WORDS
from fedecider.report.tables import (
    CANARY,
    COMPARED,
    ResultRow,
    ResultTable,
    comparisons_data,
    markdown_table,
    result_rows,
    rich_table,
    rows_data,
    shown_domains,
    variant_labels,
)
from fedecider.running.launch import Launch
from fedecider.running.progress import console, log_line, progress, stage, write_seconds
from fedecider.running.run_folder import RunFolder
from idgen.item_scores import ranks_all
from idgen.text_vectors import means_alone

# What a run of the cross-silo track promises about privacy, and the settings with which it would not hold.

SENDS_NOTHING = ("local", "centralised")


def check_privacy(settings: Settings) -> None:
    """Told before anything is built.

    Raises:
        ValueError: bound, noise or hidden users where something of a client leaves beside them, or nothing leaves.
    """
    config, privacy, users = settings.run, settings.run.privacy, settings.training.user_privacy
    counts = getattr(settings.method, "weighting", "uniform") == "examples"
    if counts and (privacy.noise_scale > 0.0 or users.noise_scale > 0.0):
        raise ValueError(
            "got weighting examples with noise, expected uniform: a client's number of samples is sent as it is"
        )
    if privacy.clips and config.method in SENDS_NOTHING:
        raise ValueError(f"got privacy.clip with {config.method}, expected none: no upload leaves a client there")
    if privacy.noise_on == "sum" and privacy.noise_scale > 0.0 and config.robust_mean != "mean":
        raise ValueError(
            f"got privacy.noise_on sum with robust_mean {config.robust_mean}, expected mean: "
            "the shares of the noise add up in the plain sum over a whole cohort only"
        )
    if users.on:
        if config.hyperparameter_candidates:
            raise ValueError(
                "got user_privacy with hyperparameter_candidates, expected none: which is taken would tell of "
                "users without noise"
            )
        reason = METHODS[config.method].beside_training
        if reason:
            raise ValueError(f"got user_privacy with {config.method}, expected another method: {reason}")
        if config.pretrain.samples.pairs:
            raise ValueError(
                "got user_privacy with samples.pairs, expected false: a sample has to be of one user alone"
            )


def check_shared_noise(privacy: PrivacyConfig, method: FederatedMethod, rows: Rows) -> None:
    """``ValueError`` for noise on the sum where the server sees more than one sum, or not all clients are in it."""
    if privacy.noise_on == "upload" or privacy.noise_scale == 0.0:
        return
    if not method.takes_mean:
        raise ValueError(
            f"got privacy.noise_on sum with {method.name}, expected upload: its server reads every single upload"
        )
    if any(bool((own_KV != own_KV[:1]).any()) for own_KV in rows.own.values()):
        raise ValueError(
            "got privacy.noise_on sum with clients of several catalogues, expected upload: rows of a catalogue are a "
            "sum over its own clients, which has their shares of the noise alone"
        )


def privacy_data(settings: Settings, num_clients: int) -> dict[str, Any]:
    """What stands in ``metrics.json``, for what is on: ``uploads``, ``users``. An epsilon of null is no guarantee.

    Raises:
        ImportError: an epsilon that needs the package dp-accounting.
    """
    run, users, found = settings.run, settings.training.user_privacy, {}
    if run.privacy.clips:
        share = hidden_share(num_clients, run.participation, seen=run.secure_sum)
        value = epsilon(run.privacy, run.num_rounds, share)
        text = privacy_report(run.privacy, run.num_rounds, share)
        found["uploads"] = _entry(value, run.privacy.delta, text)
    if users.on:
        num_epochs = run.num_rounds * settings.training.local_epochs
        asked = (users, num_epochs, run.privacy.delta)
        found["users"] = _entry(user_epsilon(*asked), run.privacy.delta, user_report(*asked))
    return found


def privacy_notes(promised: Mapping[str, Any]) -> list[str]:
    """The same as lines below a table."""
    return [f"privacy of {what}: {entry['text']}" for what, entry in promised.items()]


def _entry(value: float, delta: float, text: str) -> dict[str, Any]:
    known = value < math.inf
    return {"epsilon": value if known else None, "delta": delta if known else None, "text": text}


# What the card of a saved recommender says of its run: figures with intervals, the data, what users were
# promised.

CARD_COMPARED = ("text neighbours + counts", "popularity")
"""Simple rules that the card shows beside the adapter."""


def run_facts(
    settings: Settings,
    method: str,
    clients: Sequence[str],
    domain: Domain,
    round: int,
    rows: Sequence[ResultRow],
    promised: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts of one domain, plain values: ``method``, ``clients``, ``protocol``, ``round``, ``lora_rank``, ``seed``,
    ``num_users`` and ``rows`` (of the test items; row -> metric -> ``mean``, ``low``, ``high``),
    ``privacy`` (sentences) and ``data`` (counts of the data card, or null).

    ``rows``: what the client keeps first, where there was a choice, then the reported one. ``promised``:
    `privacy_data`.
    """
    wanted = (KEPT, with_hybrid(KEPT), rows[0].label, with_hybrid(method), HYBRID_ROW, *CARD_COMPARED)
    return {
        "method": method,
        "clients": list(clients),
        "protocol": stamp(get_protocol(settings.run.protocol)),
        "round": round,
        "lora_rank": settings.run.lora_rank,
        "seed": settings.run.seed,
        "num_users": len(domain.clients.sequences),
        "rows": rows_data([row for label in wanted for row in rows if row.label == label], domain.name),
        "privacy": [entry["text"] for entry in promised.values()],
        "data": _counts(domain.card),
    }


def _counts(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the card of a model says of its data; None where the data card has no counts, as that of published data."""
    if not {"clients", "public", "items", "split"} <= card.keys():
        return None
    groups = {name: {field: int(card[name][field]) for field in ("users", "events")} for name in ("clients", "public")}
    source = card.get("settings", {}).get("source", "prepared data")
    return {"source": source, "items": int(card["items"]["count"]), "split": str(card["split"]), **groups}


# What a finished run hands over: the backbone and an adapter for every domain, reloaded and compared.

BASES = {"none": "full precision", "nf4": "4 bits (nf4)", "int8": "8 bits (int8)"}
"""Format of the frozen layers -> the card's words for it."""


class Ended(NamedTuple):
    """A run whose rounds are over."""

    settings: Settings
    method: FederatedMethod
    blocks: Sequence[Block]
    """Clients whose models are here, which ``artifacts.domains`` are."""
    recommender: ClientModels
    artifacts: BaseArtifacts
    state: RunState
    folder: RunFolder
    launch: Launch


def export_models(
    run: Ended,
    rows: Sequence[ResultRow],
    model_of: ModelOf,
    keeps: Mapping[str, Keeps],
    shares: Scales,
    added: Mapping[str, Mapping[str, float]],
    promised: Mapping[str, Any],
) -> dict[str, Any]:
    """Hand over backbone and adapters in Hugging Face layout; every adapter is reloaded and compared.

    ``model_of`` gives the model that a client ``keeps``. ``rows``, the reported one first, what
    directions ``added`` (`added_by`), and what was ``promised`` to users are told beside the adapters.

    Returns domain -> examples of the report page.
    """
    settings, method, _, recommender, artifacts, state, folder, _ = run
    examples: dict[str, Any] = {}
    shutil.rmtree(folder.backbone, ignore_errors=True)  # of an earlier export, perhaps with files of other origin
    shutil.copytree(artifacts.distilled.folder / "backbone", folder.backbone)
    _export_later_ids(settings, artifacts, folder.backbone)
    folder.adapters.mkdir(exist_ok=True)
    for name, domain in artifacts.domains.items():
        model = model_of(name)
        kept = next((row for row in rows if row.label == KEPT), rows[0])
        metrics = {metric: value.mean for metric, value in kept.values[name].items()}
        details: dict[str, Any] = {
            "round": state.best_round,
            "lora_rank": settings.run.lora_rank,
            "seed": settings.run.seed,
            "base while training and measuring": BASES[settings.run.quantize],
        }
        if keeps[name] != "joined":
            details["model"] = KEPT_WORDS[keeps[name]]
        elif shares[name] != 1.0:
            details["share of the trained update"] = f"{shares[name]:g}"
        if "table" in settings.run.lora_settings.targets:
            details["merging"] = "only into a base whose output was given a table of its own: peft would merge it twice"
        items, catalogue = artifacts.ids[name].items, "" if domain.catalogue.name == name else domain.catalogue.name
        examples[name] = decode_examples(model, domain)
        facts = run_facts(settings, method.name, recommender.names, domain, state.best_round, rows, promised)
        alpha, pretrain = dict(added.get(name, {})) if keeps[name] == "joined" else {}, settings.run.pretrain
        model.save(
            folder.adapters / name,
            SavedBase(folder.backbone, LOCAL_BACKBONE),
            ItemTable(domain.item_keys, domain.titles, items.texts, items.token_ids, catalogue),
            Card(
                method=method.name,
                domain=name,
                prompt=prompt_layout(model.client.task, settings.ranking, model.base.model, domain.catalogue.name),
                alpha=alpha,
                metrics=metrics,
                protocol=stamp(get_protocol(settings.run.protocol)),
                details=details,
            ),
        )
        titles, encoder = pretrain.words.as_written, pretrain.text_encoder
        asked = (pretrain.samples, settings.ranking, pretrain.ids, titles, encoder, settings.run.quantize)
        write_inference_config(InferenceConfig(name, *asked, alpha, facts), folder.adapters / name)
    write_manifest(folder.root, [folder.backbone, *(folder.adapters / name for name in artifacts.domains)])
    return examples


def _export_later_ids(settings: Settings, artifacts: BaseArtifacts, backbone: Path) -> None:
    """What gives items that come later their IDs, and their vectors in the table and in the hybrid."""
    made, texts, pretrain = artifacts.pretrained.folder, backbone / TEXT_FOLDER, settings.run.pretrain
    for path in (made / PROJECTION_FILE, made / CODEBOOK_FILE):
        if path.is_file():
            texts.mkdir(exist_ok=True)
            shutil.copy(path, texts)
    if settings.run.hybrid.kind != "none" and not (texts / PROJECTION_FILE).is_file():
        encoded = encoded_catalogues(artifacts.everyone, pretrain.text_encoder, settings.run.cache)
        texts.mkdir(exist_ok=True)
        save_projection(texts / PROJECTION_FILE, means_alone(encoded), encoder_digest(pretrain.text_encoder))
    if pretrain.ids == "generator":
        shutil.copytree(made / GENERATOR_FOLDER, backbone / GENERATOR_FOLDER)


def added_by(models: ClientModels, model_of: ModelOf, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Client i -> client j -> norm of what the direction of j adds to the model of i. It is 0 for a direction of zeros,
    whatever its weight: weights alone would say that such a client contributes."""
    found = {}
    for name in names:
        adapters = model_of(name).adapters
        assert adapters is not None
        found[name] = dict(zip(models.names, adapters.slot_norms().tolist(), strict=True))
    return found


# What a finished run leaves behind: metrics with intervals, baselines, figures, bytes, and what is handed over.


def write_results(run: Ended) -> None:
    """Read the test set once, for the selected round, and write every file of the run folder but the record."""
    models = write_models(run)
    if models is None:
        return
    _write_rounds(run, models)
    log_results(run, models)
    write_seconds(run.folder.metrics)
    result = finish_report(run, models.examples)
    said = run_conclusion(result)
    log_line(f"{said.question} {said.answer}")
    for sentence in joining_lines(result):
        log_line(sentence)
    write_table(run, models)  # last: a run whose table stands there is finished


class Models(NamedTuple):
    """Test results of a run, and how the models were chosen that are handed over."""

    rows: list[ResultRow]
    """Rows of the test table, the reported one first."""
    examples: dict[str, Any]
    """Domain -> examples for the report page."""
    hybrids: Hybrids | None
    shares: Scales
    keeps: dict[str, Keeps]
    joining: dict[str, Any]
    """The comparison with training alone (``joining`` of ``metrics.json``); empty where nobody trained alone."""
    added: dict[str, dict[str, float]]
    """See `added_by`; empty for a method without fusion weights."""
    num_beams: int | None
    """None where every item was scored."""
    privacy: dict[str, Any]
    """Privacy guarantees of the run, see `privacy_data`."""


def write_models(run: Ended, others: Mapping[str, Counts] | None = None) -> Models | None:
    """Rank the test items of the clients in ``run.blocks``, and hand their models over.

    None in a process that does not write. ``others``: see `fedecider.cross_silo.entries.client_counts`.
    """
    settings, method, recommender, artifacts, state = (
        run.settings,
        run.method,
        run.recommender,
        run.artifacts,
        run.state,
    )
    names = [
        recommender.names[client] for client in sorted(torch.cat([block.clients for block in run.blocks]).tolist())
    ]
    variants = variant_labels(method.name, method.variants)
    reported, mixes = variants[method.variants[0]], settings.run.hybrid.kind != "none"
    methods: dict[str, Positions] = {reported: {}}
    valid_methods: dict[str, Positions] = {reported: {}}
    for split, found in (("test", methods), ("valid", valid_methods)):
        for variant, label in variants.items():
            if label != reported or not mixes:  # else it is ranked with the mixture, which reads the same scores
                found[label] = dict(zip(names, _evaluate(run, variant, split), strict=True))
    if not run.launch.is_main:
        return None
    recommender = recommender.by_itself()
    run = run._replace(recommender=recommender)
    shares = chosen_scales(settings, method, recommender, state, artifacts.domains)
    texts = item_texts_of(settings, artifacts, run.launch.device)
    compares = has_local(state.local)
    num_passes, passes = len(artifacts.domains) * (2 + mixes + compares), count(1)
    found_by_split = (("test", methods), ("valid", valid_methods))

    def joined_model(name: str) -> ClientModel:
        client = recommender.names.index(name)
        return reported_model(settings, method, recommender, state, client).scaled(shares[name])

    keeps: dict[str, Keeps] = dict.fromkeys(names, "joined")
    with progress("results") as report:

        def on_ranked(row: str) -> None:
            report(min(next(passes), num_passes), num_passes, row)

        fitting = Fitting(settings, artifacts, texts, others, on_ranked)
        if mixes:
            mixed = every_hybrid(fitting, method.name, joined_model)
            for split, found in found_by_split:
                found[reported] = {name: mixed.reported[split][name] for name in names}
                found |= mixed.rows[split]
        else:
            for name in (name for name in names if shares[name] != 1.0):
                model = joined_model(name)
                for split, found in found_by_split:
                    found[reported][name] = model.positions(split)
        subject = with_hybrid(method.name) if mixes else reported
        alone_row, kept_row = (with_hybrid(row) if mixes else row for row in (LOCAL, KEPT))
        handed = System(
            joined_model,
            {split: found[reported] for split, found in found_by_split},
            {split: found[subject] for split, found in found_by_split},
            mixed.hybrids[HYBRID_ROW] if mixes else None,
        )
        if compares:
            alone = local_system(fitting, recommender, state)
            for split, found in found_by_split:
                found |= {LOCAL: alone.model[split], alone_row: alone.whole[split]}
            if may_choose(settings):
                keeps, handed = chosen_systems(fitting._replace(on_ranked=silent), handed, alone)
            if set(keeps.values()) != {"joined"}:
                for split, found in found_by_split:
                    found |= {KEPT: handed.model[split], kept_row: handed.whole[split]}
        if handed.hybrids is not None:
            save_hybrids(handed.hybrids, artifacts.domains, run.folder)
        students = zero_shot(settings, artifacts, recommender, on_ranked=on_ranked)
        models = {**methods, **students}
        rules = counting_positions(settings, artifacts, texts, ("test", "valid"), on_ranked)
    counts = rules["test"]
    users = {name: domain.clients.users for name, domain in artifacts.domains.items()}
    rows = result_rows(models, counts, shared_persons(users))
    valid_rows = result_rows(valid_methods, rules["valid"])
    promised = privacy_data(settings, recommender.num_clients)
    fuses = METHODS[settings.run.method].fusion_weights is not None
    added = added_by(recommender, joined_model, names) if fuses else {}
    examples = export_models(run, rows, handed.model_of, keeps, shares, added, promised)
    tests = paired_tests(method.name, reported, {**models, **counts}, users)
    joining: dict[str, Any] = {}
    if compares:
        events = checked_events(artifacts.domains, {name: texts[name].unit_ID for name in names})
        joining = joining_data(subject, alone_row, models, users, keeps, may_choose(settings), events)
    whole = all(ranks_all(client.task.trie) for client in recommender.clients)
    num_beams = None if whole else settings.ranking.num_beams
    made = Models(rows, examples, handed.hybrids, shares, keeps, joining, added, num_beams, promised)
    _write_metrics(run, made, valid_rows, models, tests)
    records = (
        UserPositions(name, users[name], "test", label, state.best_round, position_U)
        for label, positions in {**models, **counts}.items()
        for name, position_U in positions.items()
    )
    write_per_user(run.folder.per_user, records)
    return made


def paired_tests(
    method: str, reported: str, positions: Mapping[str, Positions], users: Mapping[str, Sequence[str]]
) -> list[Comparison]:
    """The recommender that is handed over against every simple rule and what stands beside it, mean over domains.

    ``positions``: row -> domain -> (U,) test positions. Holm's correction is over all of them.
    """
    subject = subject_of(method, reported, positions)
    asked = (*UNTRAINED, *own_baselines(), *sources_of(method, reported), *without_exchange(positions))
    others = [label for label in dict.fromkeys(asked) if label in positions and label != subject]
    pairs = [(subject, other) for other in others]
    persons = shared_persons(users)
    return compare_table(positions, stream(0, "comparisons"), COMPARED, pairs, persons=persons, each_domain=False)


def log_results(run: Ended, models: Models) -> None:
    """Print the rows that answer, what must be known of them, and where all is."""
    warned, _ = _notes(run, models)
    shown = _table(run, models)._replace(rows=printed_rows(models.rows), notes=warned)
    title = f"Test results of {run.folder.root.name}, round {run.state.best_round} of {run.state.round}"
    console.print(rich_table(shown, title=title))
    log_line(f"all rows, and every domain: {run.folder.results}")
    log_line(f"adapters: {run.folder.adapters}")


def finish_report(run: Ended, examples: Mapping[str, Any]) -> RunResult:
    """Write examples, data cards and the page.

    Hours of training must not end in an error of their page: it is logged, and the page can be made again.
    """
    root = run.folder.root
    write_json(root / EXAMPLES_FILE, examples)
    write_json(root / CARDS_FILE, {name: domain.card for name, domain in run.artifacts.everyone.items()})
    result = RunResult.read(root)
    with stage("report"):
        try:
            log_line(f"report: {run_page(root, result)}")
        except Exception as error:  # see above: any error
            log_line(f"no report: {error}")
    return result


def write_table(run: Ended, models: Models) -> None:
    """``results.md``, all rows and domains."""
    table = _table(run, models)
    write_text(run.folder.results, markdown_table(table, title=f"Test, round {run.state.best_round}"))


def _table(run: Ended, models: Models) -> ResultTable:
    warned, told = _notes(run, models)
    return ResultTable(models.rows, get_protocol(run.settings.run.protocol), [*warned, *told])


def printed_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """At most eight rows for a terminal, in their order, with the macro mean alone where there are several domains.

    Of the rules without training the one with the best ndcg@10 stands for all; the method's other variants, the teacher
    and the canary are left out.
    """
    scope = shown_domains(rows)[-1]
    counts = [row for row in rows if row.label in UNTRAINED]
    best = max(counts, key=lambda row: row.values[scope]["ndcg@10"].mean)
    variants = f"{rows[0].label.partition(' (')[0]} ("
    others = {row.label for row in rows[1:] if row.label.startswith(variants)}
    others |= {*UNTRAINED, TEACHER, CANARY} - {best.label}
    kept = {scope, MACRO}
    return [
        row._replace(values={domain: values for domain, values in row.values.items() if domain in kept})
        for row in rows
        if row.label not in others
    ]


def _evaluate(run: Ended, variant: str, split: str) -> list[Tensor]:
    return evaluate(run.method, run.state.best, variant, split, run.blocks, run.launch.processes)


def _write_metrics(
    run: Ended,
    made: Models,
    valid_rows: Sequence[ResultRow],
    models: Mapping[str, Positions],
    tests: Sequence[Comparison],
) -> None:
    settings, method, _, _, artifacts, state, folder, _ = run
    protocol = get_protocol(settings.run.protocol)
    content: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": method.name,
        "reported": made.rows[0].label,
        "best_round": state.best_round,
        "best_valid_ndcg@10": state.best_score,
        "num_beams": made.num_beams,
        "text_encoder": encoder_label(settings.run.pretrain.text_encoder),
        "backbone": kept_step(artifacts.pretrained),
        "domains": {},
    }
    for name, domain in artifacts.domains.items():
        sequences = domain.clients.sequences
        content["domains"][name] = {
            "num_users": len(sequences),
            "num_items": len(domain.item_keys),
            "item_ids": artifacts.ids[name].items.report,
            "chance_hit@10": chance_hit(sequences, len(domain.item_keys), "test", protocol),
            "returned_share": {label: ranked_share(positions[name]) for label, positions in models.items()},
            "valid": rows_data(valid_rows, name),
            "test": rows_data(made.rows, name),
        }
    records = _records(folder)
    content["non_finite_uploads"], content["capped_clients"] = non_finite_uploads(records), capped_clients(records)
    if settings.run.share_grid != [1.0]:
        content["update_scales"] = dict(made.shares)
    if own_baselines():
        content["baselines"] = list(own_baselines())
    if made.privacy:
        content["privacy"] = made.privacy
    if made.hybrids is not None:
        content["hybrid"] = hybrids_data(made.hybrids)
    if made.joining:
        content["joining"] = made.joining
    if len(artifacts.domains) > 1:
        content[MACRO] = {"test": rows_data(made.rows, MACRO)}
    content["comparisons"] = comparisons_data(tests)
    write_json(folder.metrics, content)


def _write_rounds(run: Ended, models: Models) -> None:
    """Fusion weights (where the method has them) and traffic over all rounds."""
    settings, method, _, recommender, _, _, folder, _ = run
    records, names = read_records(folder.rounds), list(recommender.names)
    fusion = METHODS[settings.run.method].fusion_weights
    if fusion is not None:
        weights = fusion_over_rounds(fusion, method.init()[1], records)
        norm_KK = torch.tensor([[models.added[one][other] for other in names] for one in names], dtype=torch.float64)
        silent_KK = norm_KK == 0.0
        weights["alpha"] = weights["alpha"].masked_fill(silent_KK, 0.0)  # of a direction of zeros it says nothing
        if "alpha_modules" in weights:
            weights["alpha_modules"] = weights["alpha_modules"].masked_fill(silent_KK[:, None], 0.0)
        rounds = [record["round"] for record in records]
        content: dict[str, Any] = {"domains": names, "rounds": rounds, "alpha": weights.pop("alpha")}
        content["shares"] = norm_KK / norm_KK.sum(1, keepdim=True).clamp(min=EPSILON)
        if weights:
            content["modules"] = list(recommender.shapes)
        write_json(folder.fusion_weights, {**content, **weights})
    traffic = communication(records, names, recommender, run.method.takes_mean)
    if models.hybrids is not None:
        traffic["hybrid"] = models.hybrids.traffic
    write_json(folder.communication, traffic)


def fusion_over_rounds(fusion: FusionWeights, local: Tree, records: Sequence[dict]) -> dict[str, Tensor]:
    """``alpha`` (R, K, K) after every round, from the local state at the start on; per layer ``alpha_modules`` too.

    The latter are (R, K, M, K), ``alpha`` then their means.
    """
    start = fusion.read(local)
    if start.dim() == 2:
        return {"alpha": weights_over_rounds(records, start, fusion.log)}
    return {
        "alpha": weights_over_rounds(records, start.mean(1), fusion.log),
        "alpha_modules": weights_over_rounds(records, start, fusion.log_per_layer),
    }


def weights_over_rounds(records: Sequence[dict], start_KK: Tensor, field: str) -> Tensor:
    """What clients logged under ``field`` after every round, (R, K, K), or (R, K, M, K) with weights per layer.

    A client that was absent keeps what it had.
    """
    current_KK, over_rounds = start_KK.clone(), []
    for record in records:
        for client in record["clients"]:
            current_KK[client["client"]] = torch.tensor(client[field])
        over_rounds.append(current_KK.clone())
    return torch.stack(over_rounds)


def communication(
    records: Sequence[dict], names: Sequence[str], recommender: ClientModels, takes_mean: bool
) -> dict[str, Any]:
    """Bytes per round, client and direction, with the payload of every tensor; P scalars make one adapter."""
    per_round = []
    for record in records:
        clients = {}
        for group in record["traffic"]:
            sizes = {way: message_bytes(group, way) for way in WAYS}
            clients.update({names[client]: sizes for client in group["clients"]})
        per_round.append({"round": record["round"], "clients": clients})
    return {
        "unit": "bytes of one safetensors message per client, round and direction",
        "adapter_scalars": num_scalars(recommender.start),
        "common_rows": common_rows(travelling_rows(recommender.rows, takes_mean).in_messages),
        "total": total_bytes(records),
        "rounds": per_round,
        "tensors": {str(record["round"]): record["traffic"] for record in (records[0], records[-1])},
    }


def _records(folder: RunFolder) -> list[dict]:
    """Of all rounds; none at a site of a deployment, whose server keeps them."""
    return read_records(folder.rounds) if folder.rounds.is_file() else []


def _notes(run: Ended, models: Models) -> tuple[list[str], list[str]]:
    """What must be known before the numbers are read, and how they came about."""
    settings, state, records = run.settings, run.state, _records(run.folder)
    taken = ", ".join(f"{name} {share:g}" for name, share in models.shares.items())
    choices = {} if models.hybrids is None else models.hybrids.choices
    sides = ", ".join(f"{name} {one.weights}" for name, one in choices.items())
    protocol, domains = get_protocol(settings.run.protocol), run.artifacts.domains
    chances = {
        name: chance_hit(domain.clients.sequences, len(domain.item_keys), "test", protocol)
        for name, domain in domains.items()
    }
    warned = [
        *few_candidates(chances),
        *privacy_notes(models.privacy),
        *upload_notes(records, run.recommender.names),
        *sum_notes(settings.run.secure_sum, settings.run.privacy.clips),
    ]
    return warned, [
        f"round {state.best_round} of {state.round} has the best validation ndcg@10 "
        f"({state.best_score:.4f}) of {run.method.variants[0]}",
        *([selection_text(**read_json(run.folder.selection))] if run.folder.selection.is_file() else []),
        "every item is scored, as its ID is one token"
        if models.num_beams is None
        else f"beam search with {models.num_beams} beams",
        *([f"share of the trained update, by validation items: {taken}"] if settings.run.share_grid != [1.0] else []),
        *([f"hybrid, by validation items: {sides}"] if sides else []),
        f"text neighbours: item texts as vectors of {encoder_label(settings.run.pretrain.text_encoder)}",
    ]
