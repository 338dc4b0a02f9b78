"""Attacks on what parties see: update-inference, membership, and how well they tell.

A model that was trained on a user finds the user's next events likelier than the reference does, which never saw the
user. Taking the reference's log-probability away removes how hard the user is in general (Watson et al., ICLR 2022); it
stands in for the shadow models of LiRA (Carlini et al., 2022), which would have to be trained by the dozen.

What they use: a client's tables change where it has examples, its own items and the negatives that it drew; to first
order a row moves by ``(y - sigmoid(z)) p_u``, along the client's vector for an own item and against it for a negative,
and there are more negatives. Own items come back in every round, negatives are drawn anew, so that rounds add up.

Shape legend: Q questions, U users, C clients, I items, D numbers of a row, A attacks, P members, N others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from fedecider.bounds import OneOrMore, Seed, ZeroOrMore, dataclass
from fedecider.engine.result import RunResult
from fedecider.evaluation.protocols import train_part
from fedecider.evaluation.statistics import Interval
from fedecider.federation.record import write_json
from fedecider.report.page import PageTable, Section
from fedecider.report.tables import interval_text, number_text
from fedecider.running.run_folder import RunFolder, read_run, refuse_site


@dataclass(frozen=True)
class AuditConfig:
    """Audit: of which run, and how far.

    Args:
        run: The run folder that scripts/federate.py printed.
        data: The folder of the data, when it is not where the run found it: prepared domains (cross-silo track) or the
            raw files (cross-device track).
        num_rounds: Cross-device track: the number of rounds, from the first on, that are done again and watched; never
            more than the run had.
        num_clients: Cross-device track: the number of clients, drawn once, that are attacked; 0 takes all.
        num_events: Cross-silo track: the number of newest train events of a user that the attack asks the model about.
        num_users: Cross-silo track: the largest number of members, and of others, of a client that are attacked, drawn
            once; 0 takes all.
        seed: The seed of what is drawn here: who is attacked, halves of clients, intervals.
    """

    run: str
    data: str = ""
    num_rounds: OneOrMore = 3
    num_clients: ZeroOrMore = 200
    num_events: OneOrMore = 5
    num_users: ZeroOrMore = 0
    seed: Seed = 0


# Whether a user was trained on, guessed from how likely models find the user's own events, against a reference.

STATISTICS = ("mean gain over the student", "largest gain over the student", "mean log-probability")


class Questions(NamedTuple):
    """Train events with what came before them."""

    histories: list[list[int]]
    targets: Tensor
    """(Q,) item numbers."""
    user_Q: Tensor
    """(Q,) place of the user among those asked about, from 0, every one at least once."""

    @property
    def num_users(self) -> int:
        return int(self.user_Q.max()) + 1 if len(self.user_Q) else 0


def questions_about(sequences: Sequence[Sequence[int]], num_events: int) -> Questions:
    """The ``num_events`` newest events of each user's train part, none of them the first; users without any are left
    out. Members and others are asked alike."""
    parts = [list(train_part(sequence)) for sequence in sequences]
    asked = [part for part in parts if len(part) > 1]
    places = [
        (user, place) for user, part in enumerate(asked) for place in range(max(1, len(part) - num_events), len(part))
    ]
    return Questions(
        [asked[user][:place] for user, place in places],
        torch.tensor([asked[user][place] for user, place in places], dtype=torch.int64),
        torch.tensor([user for user, _ in places], dtype=torch.int64),
    )


def user_scores(log_prob_Q: Tensor, reference_Q: Tensor, user_Q: Tensor) -> dict[str, Tensor]:
    """Each of `STATISTICS` -> (U,) float64, higher for likelier members."""
    gain_Q, log_prob_Q = (log_prob_Q - reference_Q).double(), log_prob_Q.double()

    def reduced(value_Q: Tensor, how: str) -> Tensor:
        start_U = torch.zeros(int(user_Q.max()) + 1, dtype=torch.float64)
        return start_U.scatter_reduce(0, user_Q, value_Q, how, include_self=False)

    values = reduced(gain_Q, "mean"), reduced(gain_Q, "amax"), reduced(log_prob_Q, "mean")
    return dict(zip(STATISTICS, values, strict=True))


# Which items a client trained on, guessed from how the rows of its item tables moved: a small fixed family of
# attacks.

ATTACKS = (
    "moved at all",
    "size of the move",
    "along the main direction",
    "against the mean direction",
    "size of the move, less the others' mean",
    "along the main direction, less the others' mean",
    "against the mean direction, less the others' mean",
)
"""In the order of :func:`move_scores`; the first one needs nothing but to look."""


def move_scores(move_CID: Tensor) -> Tensor:
    """(A, C, I) float32 scores of every item for every client, from the moves of all audited clients in one round.

    Moves are what was uploaded less what was downloaded. The last three attacks see each move less the mean of the
    other clients' moves: what all of them do alike, a regulariser for instance, says nothing about one.
    """
    alone_CID = move_CID - _mean_of_others(move_CID)
    size_CI = torch.linalg.vector_norm(move_CID, dim=2)
    return torch.stack(
        [
            (size_CI > 0.0).float(),
            size_CI,
            along_main_direction(move_CID),
            against_mean(move_CID),
            torch.linalg.vector_norm(alone_CID, dim=2),
            along_main_direction(alone_CID),
            against_mean(alone_CID),
        ]
    ).float()


def along_main_direction(move_CID: Tensor) -> Tensor:
    """(C, I) ``m_i . v`` over the largest product of a client, v the first right singular vector of its moves.

    A vector has two signs: v is turned so that the sum of the products is negative, since negatives are the most.
    """
    gram_CDD = move_CID.double().transpose(1, 2) @ move_CID.double()
    main_CD = torch.linalg.eigh(gram_CDD).eigenvectors[:, :, -1].to(move_CID)
    product_CI = (move_CID @ main_CD[:, :, None])[:, :, 0]
    sign_C1 = torch.where(product_CI.sum(1, keepdim=True) > 0.0, -1.0, 1.0)
    return _scaled(product_CI * sign_C1)


def against_mean(move_CID: Tensor) -> Tensor:
    """(C, I) ``- m_i . sum_j m_j`` over the largest product of a client: the sum of all moves points where negatives
    go."""
    return _scaled(-(move_CID @ move_CID.sum(1)[:, :, None])[:, :, 0])


def _scaled(score_CI: Tensor) -> Tensor:
    """So that every round and client counts alike in a sum over rounds."""
    return score_CI / score_CI.abs().amax(1, keepdim=True).clamp(min=torch.finfo(score_CI.dtype).tiny)


def _mean_of_others(move_CID: Tensor) -> Tensor:
    others = max(1, len(move_CID) - 1)
    return (move_CID.sum(0) - move_CID) / others if len(move_CID) > 1 else torch.zeros_like(move_CID)


# How well scores tell members from all others, with intervals; and which attack of a family is reported.

FALSE_POSITIVES = 0.01
"""Share of others that :func:`true_positives` lets pass."""
NUM_RESAMPLES = 1000


class Scored(NamedTuple):
    """Scores of one client's members (P,) and of others (N,); higher: likelier a member."""

    member_P: Tensor
    other_N: Tensor


def auc(scored: Scored) -> float:
    """Area under the ROC curve: the chance that a member scores above another, ties counted half.

    The Mann-Whitney statistic over P N. 1/2 is guessing. ``ValueError`` when there are no members or no others.
    """
    member_P, other_N = _both(scored)
    sorted_N = other_N.sort().values
    below_P = torch.searchsorted(sorted_N, member_P, right=False) + torch.searchsorted(sorted_N, member_P, right=True)
    return float(below_P.double().mean()) / (2 * len(other_N))


def true_positives(scored: Scored, false_positives: float = FALSE_POSITIVES) -> float:
    """Share of members above the lowest threshold that at most ``false_positives`` of the others exceed.

    With the right threshold a guess of nothing gets ``false_positives``. What matters where few members are found, but
    surely (Carlini et al., 2022).
    """
    member_P, other_N = _both(scored)
    num_passing = math.floor(false_positives * len(other_N))
    threshold = other_N.sort(descending=True).values[min(num_passing, len(other_N) - 1)]
    return float((member_P > threshold).double().mean())


def interval_over_users(
    statistic: Callable[[Scored], float],
    scored: Sequence[Scored],
    generator: torch.Generator,
    num_resamples: int = NUM_RESAMPLES,
    level: float = 0.95,
) -> Interval:
    """Mean over clients of ``statistic`` with its percentile bootstrap: members and others of every client are drawn
    with replacement, apart from each other."""
    values = [_mean([statistic(one) for one in scored])]
    for _ in range(num_resamples):
        values.append(_mean([statistic(Scored(*(_redrawn(part, generator) for part in one))) for one in scored]))
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(values[1:], dtype=torch.float64), bounds).tolist()
    return Interval(values[0], low, high)


def chosen_on_others(value_AC: Tensor, fold_C: Tensor) -> Tensor:
    """(C,) number of the attack for each client: the best mean over the clients of all other folds.

    An attack that is chosen where it is reported would be flattered. With one fold the first attack stands for all.
    """
    chosen_C = torch.zeros_like(fold_C)
    for fold in fold_C.unique():
        others_C = fold_C != fold
        if others_C.any():
            chosen_C[~others_C] = value_AC[:, others_C].mean(1).argmax()
    return chosen_C


def _both(scored: Scored) -> tuple[Tensor, Tensor]:
    member_P, other_N = (torch.as_tensor(part).double() for part in scored)
    if not len(member_P) or not len(other_N):
        raise ValueError(f"got {len(member_P)} members and {len(other_N)} others, expected some of both")
    return member_P, other_N


def _redrawn(value_P: Tensor, generator: torch.Generator) -> Tensor:
    return value_P[torch.randint(len(value_P), (len(value_P),), generator=generator)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# What an audit found: rows, the file in the run folder, the printed table, the section of the page.

HEADER = ("who, and what it sees", "AUC", "TPR at 1 % FPR", "attack")
READING = (
    "AUC: the chance that a member scores above another; 0.5 is guessing. Brackets: 95 % bootstrap. Of a fixed family "
    "of attacks the one is reported that did best on other clients. A low number says that these attacks found "
    "nothing, not that nothing is there."
)


class AuditRow(NamedTuple):
    """How well one party tells members from others by what it sees."""

    party: str
    sees: str
    attack: str
    """The attack that was chosen most often."""
    auc: Interval
    true_positives: Interval | None
    """At `fedecider.audit.attacks.FALSE_POSITIVES`; None where members are items of one client."""


class Outcome(NamedTuple):
    """An audit of one run."""

    run: str
    method: str
    about: str
    """What is guessed: ``items`` that a client trained on, or ``users`` on whom it trained."""
    utility: Interval
    """Test ndcg@10 of the reported row."""
    epsilon: str
    """As the run reports it, else ``none``."""
    bytes_up: float
    """Of a client in a round, mean."""
    rows: Sequence[AuditRow]
    notes: Sequence[str]


def finished(root: Path) -> tuple[RunFolder, RunResult]:
    """Folder and result of a run that has ended.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, or a file is damaged.
    """
    folder = RunFolder(root)
    refuse_site(root, read_run(root))
    if not folder.results.is_file():
        raise ValueError(
            f"no results.md in {root}: the run did not finish, expected one that did. Go on with it: "
            f"scripts/federate.py --resume true --output {root} and the settings of the run"
        )
    return folder, RunResult.read(root)


def epsilon_of(metrics: Mapping[str, Any]) -> str:
    """``epsilon 3.2 at delta 1e-05`` where ``metrics.json`` states a guarantee, else ``none``.

    It holds one text, or one for each unit that is protected, such as ``users``.
    """
    stated = metrics.get("privacy", "")
    texts = {"": stated} if isinstance(stated, str) else {what: entry["text"] for what, entry in stated.items()}
    found = {what: text.partition(" over ")[0] for what, text in texts.items() if text.startswith("epsilon")}
    return ", ".join(f"{what}: {text}" if what else text for what, text in found.items()) or "none"


def write_outcome(folder: RunFolder, outcome: Outcome) -> None:
    """``audit.json``; a row has all that the table says of it, so that rows of several runs can be put together."""
    common = {name: value for name, value in _plain(outcome).items() if name not in ("rows", "notes")}
    rows = [{**common, **_plain(row)} for row in outcome.rows]
    write_json(folder.audit, {**common, "rows": rows, "notes": list(outcome.notes)})


def outcome_table(outcome: Outcome) -> Table:
    """For a terminal."""
    table = Table(title=f"Audit of {outcome.run}", show_edge=False, caption_justify="left")
    table.caption = "\n".join([_summary(_plain(outcome)), READING, *outcome.notes])
    for name in HEADER:
        table.add_column(name)
    for row in outcome.rows:
        table.add_row(*_cells(_plain(row)))
    return table


def audit_section(content: Mapping[str, Any]) -> list[Section]:
    """``audit.json`` as a section of a run's page; nothing for a run that was not audited."""
    if not content:
        return []
    table = PageTable(HEADER, [_cells(row) for row in content["rows"]])
    return [Section("Audit", [_summary(content), READING, *content["notes"]], [table])]


def _plain(value: Outcome | AuditRow) -> dict[str, Any]:
    return {name: one._asdict() if isinstance(one, Interval) else one for name, one in value._asdict().items()}


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = row["true_positives"]
    rate = "-" if found is None else interval_text(found, 3)
    return [f"{row['party']}: {row['sees']}", interval_text(row["auc"], 3), rate, row["attack"]]


def _summary(content: Mapping[str, Any]) -> str:
    what = {"items": "which items a client trained on", "users": "which users a client trained on"}[content["about"]]
    return (
        f"{content['method']}, guessed is {what}; test ndcg@10 {interval_text(content['utility'])}, epsilon: "
        f"{content['epsilon']}, {number_text(content['bytes_up'], 0)} bytes up a client and round."
    )
