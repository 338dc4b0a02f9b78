"""The words with which the page of a comparison begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from fedecider.comparison.baselines import SASREC, SASREC_TEXT
from fedecider.comparison.collect import Collected
from fedecider.comparison.plan import CompareConfig, RowRuns, shown_as
from fedecider.evaluation.metrics import MACRO
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.llm.baselines import STUDENT, UNTRAINED
from fedecider.llm.memories import MEMORY_ROW, OWN_MEMORY_ROW, with_memory
from fedecider.llm.run_warnings import canary_alarms
from fedecider.llm.run_words import valid_means
from fedecider.methods import METHODS
from fedecider.report.page import Opening
from fedecider.report.rows import comparisons_data, rows_data
from fedecider.report.tables import shown_domains
from fedecider.report.verdict import BEFORE_ROUNDS, WITHOUT_EXCHANGE, Evidence, opening
from fedecider.running.damage import read_object

LOCAL = "local"


def chosen_row(methods: Sequence[RowRuns], collected: Collected) -> str | None:
    """The row that one would take: the best one on validation items, whatever the test says.

    Methods that pool all data are no choice for clients that keep theirs; None where there are only such.
    """
    return max(_choices(methods), key=lambda label: collected.valid[label], default=None)


def comparison_opening(config: CompareConfig, methods: Sequence[RowRuns], collected: Collected) -> Opening | None:
    """About the row that is best on validation, beside simple rules, local training and models of one client.

    None where there is no row that one could switch on.
    """
    chosen = chosen_row(methods, collected)
    if chosen is None:
        return None
    about = (
        f"What was compared: {len(methods)} method{'s' if len(methods) > 1 else ''} with {config.seeds} "
        f"seed{'s' if config.seeds > 1 else ''} each. {chosen} is the one with the best validation ndcg@10"
        f"{', methods that pool all data left out' if any(METHODS[row.method].pooled for row in methods) else ''}."
    )
    return opening(comparison_evidence(config, methods, collected, chosen), [about])


def comparison_evidence(
    config: CompareConfig, methods: Sequence[RowRuns], collected: Collected, chosen: str
) -> Evidence:
    """What the runs say about the row ``chosen``."""
    of_chosen = next(row for row in methods if chosen in shown_as(row).values())
    runs = of_chosen.runs
    metrics = [read_object(run.folder.metrics) for run in runs]
    *domains, scope = shown_domains(collected.rows)
    rows = rows_data(collected.rows, scope)
    beside = {MEMORY_ROW: "the memory without a model"}
    if chosen != of_chosen.label:
        beside = {of_chosen.label: "the model without its memory", **beside}
    beside |= {label: "all data in one place" for label in _labels(methods) if label not in _choices(methods)}
    beside |= {name: f"{name}, federated without a language model" for name in ID_METHODS}
    beside |= {SASREC: "SASRec of one domain", SASREC_TEXT: "SASRec that starts from texts"}
    settings = runs[0].settings.run
    return Evidence(
        subject=chosen,
        rows=rows,
        simple=UNTRAINED,
        protocol=settings.protocol,
        tests=[one for one in comparisons_data(collected.comparisons) if one["domain"] == scope],
        beside=beside,
        without_exchange={label: WITHOUT_EXCHANGE for row in methods if row.method == LOCAL for label in _alone(row)},
        before_rounds={STUDENT: BEFORE_ROUNDS},
        domains={name: rows_data(collected.rows, name) for name in domains},
        valid=_valid([valid_means(one) for one in metrics], shown_as(of_chosen)),
        num_seeds=config.seeds,
        num_clients=len(metrics[0]["domains"]),
        chance=fmean(domain["chance_hit@10"] for domain in metrics[0]["domains"].values()),
        planted=not settings.data,
        alarms=[*canary_alarms(metrics[0]), *_better_on_test(chosen, methods, collected, scope)],
    )


def _labels(methods: Sequence[RowRuns]) -> list[str]:
    return [label for row in methods for label in shown_as(row).values()]


def _alone(row: RowRuns) -> list[str]:
    """Labels of ``row`` whose memory, if any, counts nothing of siblings."""
    labels = list(shown_as(row).values())
    counted = with_memory(row.label) if with_memory(row.label, OWN_MEMORY_ROW) in labels else ""
    return [label for label in labels if label != counted]


def _choices(methods: Sequence[RowRuns]) -> list[str]:
    """Rows that one could take."""
    return _labels([row for row in methods if not METHODS[row.method].pooled])


def _valid(per_seed: Sequence[dict[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Means over the seeds; the models of the runs go by the names of their rows."""
    common = set.intersection(*(set(one) for one in per_seed))
    return {names.get(label, label): fmean(one[label] for one in per_seed) for label in common}


def _better_on_test(chosen: str, methods: Sequence[RowRuns], collected: Collected, scope: str) -> list[str]:
    labels = _choices(methods)
    means = {row.label: row.values[scope]["hit@10"].mean for row in collected.rows if row.label in labels}
    best = max(means, key=lambda label: means[label])
    if best == chosen:
        return []
    where = "mean over domains" if scope == MACRO else scope
    return [
        f"{chosen} was chosen on validation items; on test items {best} has more: {100 * means[best]:.1f} against "
        f"{100 * means[chosen]:.1f} of 100 users ({where})."
    ]
