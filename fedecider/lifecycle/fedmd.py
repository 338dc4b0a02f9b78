"""A round of FedMD for companies whose backbones differ (`distill.soft_targets`): files in, files out.

Before it each company has a run of its own over one catalogue, of any backbone, and all have one table of public
histories. In a round each writes lists for these histories (`fedecider recommend --all --events PUBLIC --k 50`), which
are items with log-probabilities, and sends them to the others. Then each digests the mean of all lists and trains on
its own events again.

What leaves a company are the lists, and nothing else. They say what its model, and its ensemble unless it is left out,
expect behind histories that everybody knows. That still tells of its customers: items that only they bought together
stand high in its lists and in no others', so that somebody who knows a customer's events can test whether they were
trained on (membership), a single item's history most clearly. Nothing is hidden by noise: the channel of a federated
run does not see these files. Where single customers must be hidden, train with user_privacy and write lists without
the ensemble: what is made of such an adapter costs no more epsilon.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.soft_targets import TopScores, consensus, soft_batches
from fedecider.bounds import Diverged
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.method import Tree
from fedecider.federation.streams import derive_seed
from fedecider.lifecycle.update import Counted, counted, drawn_to_rank, put_private, refitted
from fedecider.lifecycle.warm_start import Scores, loaded_scores, ranked_by, train_on
from fedecider.methods.client_models import ClientModels
from fedecider.methods.local_training import train_locally
from fedecider.models.ensemble import MODEL_ALONE
from fedecider.models.lists import histories_of, read_lists
from fedecider.models.source import find_source
from fedecider.models.versions import add_version, changing, home_of, read_versions
from fedecider.running.manifest import note_changed
from fedecider.running.run_folder import RunFolder
from idgen.backbones.family import TokenBatch

ROUNDING = 1e-3
"""By which the probabilities of a list, which were rounded when they were written, may exceed 1."""


class Learned(NamedTuple):
    """What a round did; both models rank the validation items of the company's customers, without an ensemble."""

    num_histories: int
    old: Scores
    new: Scores
    version: int
    """Of the run, in force from now on; 0: the new model is not better, and nothing was written."""


def fedmd(
    run: str | Path,
    lists: Sequence[str | Path],
    events: str | Path,
    company: str | None = None,
    *,
    epochs: int = 2,
    data: str = "",
) -> Learned:
    """One company's part of a round, after the lists were exchanged.

    The adapter digests the consensus, and is then trained on the company's own events, at the learning rate with which
    its run ended. It is in force, as a new version of the run, where its model ranks the validation items better
    (ndcg@10); the ensemble keeps its counts, and its weights are fitted again.

    Args:
        run: The company's run, whose last version is taken.
        lists: Files that ``fedecider recommend --all`` wrote, one for each company, the own one too.
        events: The table of public histories: what a customer is there is one history.
        company: The company; None where there is only one.
        epochs: Over the public histories, and then over the own events.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.

    Raises:
        ValueError: lists of one company alone, of another catalogue, or not of these histories; a run without an
            ensemble that counts its events, or one with user_privacy.
        FileNotFoundError: there is no such run or company.
        Diverged: the training did.
    """
    if len(lists) < 2:
        raise ValueError(f"got the lists of {len(lists)} company, expected those of two or more, the own ones too")
    now = counted(run, company, data)
    name, home, settings = now.place.domain, home_of(now.run.root), recorded_settings(now.run.root)
    sequences, scores = public_scores(now, lists, events)
    rate = settings.training.learning_rate * settings.training.lr_decay_per_round ** (settings.run.num_rounds - 1)
    seed = derive_seed(settings.run.seed, "fedmd", read_versions(home).in_force)
    settings = settings._replace(
        training=replace(settings.training, learning_rate=rate), run=replace(settings.run, seed=seed)
    )
    rows = SequenceArray.of(now.histories.sequences)
    rows = rows if now.histories.is_counted_whole else rows.without_last(NUM_HELD_OUT - 1)
    by_model, ranked = now.ensemble._replace(beside_model=MODEL_ALONE), drawn_to_rank(rows, now.place)
    with tempfile.TemporaryDirectory() as scratch:
        adapter, device = Path(scratch) / "adapter", torch.device("cpu")
        target = partial(consensus, scores, num_items=len(now.keys))
        first = partial(digest, sequences=sequences, target=target)
        train_on(now.place, rows.without_last(1), settings, epochs, device, adapter, first)
        place = now.place._replace(adapter=adapter)
        old, new = (ranked_by(now.source, one, by_model, ranked, device) for one in (now.place, place))
        if new.ndcg <= old.ndcg:
            return Learned(len(sequences), old, new, 0)
        whole = refitted(now, rows, loaded_scores(now.source, place, device))._replace(knowledge=now.ensemble.knowledge)

        def change(folder: RunFolder) -> None:
            put_private(folder, name, whole, now.keys, now.histories)
            shutil.rmtree(folder.adapters / name)
            shutil.copytree(adapter, folder.adapters / name)
            note_changed(folder.root, [folder.adapters / name])

        with changing(home):
            if find_source(run).run != now.run:
                raise ValueError(f"got {run}, of which another version came into force meanwhile. Repeat the round")
            about = f"{name} learned from the lists of {len(lists)} companies"
            return Learned(len(sequences), old, new, add_version(home, now.run.root, about, change))


def public_scores(
    now: Counted, lists: Sequence[str | Path], events: str | Path
) -> tuple[list[list[int]], list[TopScores]]:
    """The public histories, in numbers of the company's items, and what each company says of them.

    Raises:
        ValueError: as of `fedmd`.
    """
    number_of = {key: number for number, key in enumerate(now.keys)}
    public = histories_of(str(now.run.root), now.place.domain, events=str(events))
    _check_items(public.item_keys, number_of, events)
    sequences = [[number_of[public.item_keys[item]] for item in row] for row in public.sequences]
    names = [customer for customer, _ in public.of(None, now.place.domain)]
    return sequences, [_scores_in(path, names, number_of) for path in lists]


def _check_items(keys: Sequence[str], number_of: Mapping[str, int], where: str | Path) -> None:
    if unknown := sorted(set(keys) - number_of.keys()):
        raise ValueError(
            f"got {len(unknown):,} items in {where} that the company's catalogue does not have, such as {unknown[0]}, "
            "expected one catalogue for all companies"
        )


def _scores_in(path: str | Path, names: Sequence[str], number_of: Mapping[str, int]) -> TopScores:
    found = read_lists(path)
    if missing := [name for name in names if not found.get(name, ([], []))[0]]:
        raise ValueError(
            f"got no list for {len(missing):,} of {len(names):,} public histories in {path}, such as {missing[0]}, "
            "expected what fedecider recommend --all writes with the same --events"
        )
    _check_items([key for name in names for key in found[name][0]], number_of, path)
    item, log_prob = (
        pad_sequence([torch.tensor(row, dtype=kind) for row in rows], batch_first=True, padding_value=-1)
        for kind, rows in (
            (torch.int64, [[number_of[key] for key in found[name][0]] for name in names]),
            (torch.float64, [found[name][1] for name in names]),
        )
    )
    scores = TopScores(item, log_prob)
    if not (most := float(scores.known.sum(1).max())) <= 1.0 + ROUNDING:  # or NaN
        raise ValueError(
            f"got scores in {path} whose probabilities add up to {most:.3g}, expected log-probabilities, as fedecider "
            "recommend writes them"
        )
    return scores


def digest(
    models: ClientModels, start: Tree, sequences: Sequence[Sequence[int]], target: Callable[[Tensor], Tensor]
) -> Tree:
    """The adapters of the only client after its local epochs over the public histories.

    Raises:
        Diverged: the training did.
    """
    client = models.clients[0]

    def batches(generator: torch.Generator) -> Iterator[TokenBatch]:
        return soft_batches(client.task, sequences, target, models.training.batch_size, generator)

    public = client._replace(name=f"{client.name}, public histories", batches=batches, sample=None)
    trained = train_locally(models._replace(clients=[public]), 0, 1, start)
    if not trained.finite:
        raise Diverged(str(trained.log.get("diverged", "weights that are no finite numbers")))
    return trained.pair
