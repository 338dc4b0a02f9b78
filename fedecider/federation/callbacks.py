"""What follows the rounds of a run: records, checkpoints, progress bars, functions of the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.method import FederatedMethod
from fedecider.federation.record import Recorder
from fedecider.federation.state import RunState, load_state, save_state
from fedecider.scratch import remove_left


class Round(NamedTuple):
    """A round that has ended."""

    number: int
    record: dict[str, Any]
    """The line of ``rounds.jsonl``: validation metrics of each client, losses, bytes, seconds."""
    state: RunState
    """Tensors of server and clients after the round, and those of the best round so far; not to be changed."""
    method: FederatedMethod
    clients: Sequence[str]
    """Names, in client order; empty where clients are single users."""
    is_last: bool = False
    """Whether no round follows; also where a callback before this one ended the run."""
    diverged: str = ""
    """Why no upload of the round could be used; the run ends with it."""

    @property
    def is_best(self) -> bool:
        """Whether no round before had a better validation score."""
        return self.state.best_round == self.number


ClientsDone = Callable[[int, str, int, int], None]
"""(round, "training" or "validation", clients done, all clients)."""


def silent(round: int, what: str, done: int, total: int) -> None:
    """Print nothing."""


class RoundCallback(NamedTuple):
    """What the loop calls, in every process and in the order of its list of callbacks."""

    round_ended: Callable[[Round], Any] = lambda round: None
    """What is true ends the run after this round."""
    clients_done: ClientsDone = silent


def recording(recorder: Recorder) -> RoundCallback:
    """Writes the record of each round. It comes before the checkpoints: what a kill in between leaves too much,
    resuming drops again."""
    return RoundCallback(lambda round: recorder.write(round.record))


def collecting(records: list[dict]) -> RoundCallback:
    """Keeps the record of each round in a list."""
    return RoundCallback(lambda round: records.append(round.record))


class Checkpoints(NamedTuple):
    """Writes checkpoints, and finds where a stopped run goes on."""

    folder: Path
    fingerprint: str
    """Of the configuration: checkpoints of another one are refused."""
    recorder: Recorder = Recorder(None)
    """Of the same run: a checkpoint holds the digest of its records."""
    every: int = 1
    """Rounds between checkpoints; the last round is always saved."""
    writes: bool = True
    """Whether this process is the one that writes."""

    def start(self, resume: bool) -> RunState | None:
        """The newest checkpoint of a run that is resumed, None without one. Later records and debris are removed.

        Raises:
            CannotResume: checkpoints or records are damaged, or belong to another configuration.
        """
        if self.writes:
            remove_left(self.folder, alone=True)
        state = load_state(self.folder, self.fingerprint, self._warn) if resume else None
        self.recorder.rewind(state.round if state else 0, state.records if state else "")
        return state

    def callback(self) -> RoundCallback:
        """Saves the rounds that are due; it comes after every callback that may end the run."""

        def save(round: Round) -> None:
            due = round.is_last or round.number % self.every == 0
            if self.writes and due and not round.diverged:
                save_state(round.state._replace(records=self.recorder.digest()), self.folder, self.fingerprint)

        return RoundCallback(save)

    def _warn(self, text: str) -> None:
        if self.writes:
            print(f"warning: {text}", file=sys.stderr)
