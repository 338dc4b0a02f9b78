"""The real round loop, with its records in memory."""

from __future__ import annotations

from pathlib import Path

from fedecider.federation.callbacks import Checkpoints, collecting, recording
from fedecider.federation.channel import Channel
from fedecider.federation.method import FederatedMethod
from fedecider.federation.processes import Processes
from fedecider.federation.record import Recorder
from fedecider.federation.rounds import Clients, RoundSettings, run_rounds
from fedecider.federation.state import RunState


def recorded_rounds(
    method: FederatedMethod,
    clients: Clients,
    settings: RoundSettings,
    channel: Channel = Channel(),
    *,
    recorder: Recorder = Recorder(None),
    checkpoints: Path | None = None,
    resume: bool = False,
    processes: Processes = Processes(),
) -> tuple[RunState, list[dict]]:
    """The final state, and the records; they are written by ``recorder`` too, and checkpoints into a folder."""
    records: list[dict] = []
    callbacks = [recording(recorder), collecting(records)]
    state = None
    if checkpoints is not None:
        kept = Checkpoints(checkpoints, "", recorder, writes=processes.index == 0)
        callbacks.append(kept.callback())
        state = kept.start(resume)
    return run_rounds(method, clients, settings, channel, callbacks, processes, state), records
