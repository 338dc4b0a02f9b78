"""What a reader of a run's figures must know first: leaks, ties, empty groups, refused updates, untrained modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedecider.engine.page import canary_score
from fedecider.engine.result import RunResult
from fedecider.evaluation.protocols import get_protocol, stamp

SHOWN = 10
"""Places of the longest list that a table shows."""
TIED = 0.01
"""Share of users with equal times on their last two events from which on it is said."""


def run_warnings(result: RunResult) -> list[str]:
    """All warnings of a finished run but those of the canary, the most serious first; empty when there is none."""
    has_pool = bool(result.settings["run"].get("public_domains"))  # runs before there was the choice have none
    protocol = get_protocol(result.protocol)
    cards = {name: result.cards[name] for name in result.clients if name in result.cards}
    shares = {name: card["clients"].get("tied_last_two_share") for name, card in cards.items()}
    why = result.record.get("why_protocol", ())  # the first line says which it is, and stands among the settings
    return [
        *([stamp(protocol, canary_score(result))] if protocol.leaks else []),
        *(line.removeprefix("warning: ") for line in why if not line.startswith("protocol ")),
        *_clients(result.rounds, result.clients),
        *([] if protocol.baskets else _ties(shares)),
        *(warning for name, card in cards.items() for warning in _data(name, card, protocol.drop_seen)),
        *(
            f"{', '.join(names)}: the group of {group} users is empty"
            for group in (("clients",) if has_pool else ("clients", "public"))
            if (names := [name for name, card in cards.items() if card[group]["users"] == 0])
            and (group == "clients" or len(names) < len(cards))  # nobody is public by default
        ),
        *(warning for name, card in cards.items() for warning in _beams(name, card, result)),
        *_origin(result),
    ]


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
    found = ", ".join(f"{name} {share:.1%}" for name, share in tied.items())
    return [
        f"some customers' last two purchases have the same time ({found}); which of them is the test item is "
        "arbitrary, for all rows alike: finer times in the export avoid this"
    ]


def _data(name: str, card: Mapping[str, Any], drop_seen: bool) -> list[str]:
    clients, found = card["clients"], []
    if clients.get("timestamps") == "unknown":
        found.append(f"{name}: no event has a time, so the order of the file decides which item is held out")
    if drop_seen and clients.get("repeated_test_item_share"):
        found.append(
            f"{name}: {clients['repeated_test_item_share']:.1%} of the users had their test item before; where seen "
            "items are dropped, no method can find it"
        )
    return found


def _beams(name: str, card: Mapping[str, Any], result: RunResult) -> list[str]:
    """Beams are searched before items of the history are dropped: long histories leave too few to rank. No beams are
    searched where every item is scored."""
    median, beams = card["clients"].get("length", {}).get("median"), result.metrics["num_beams"]
    if beams is None or median is None or not get_protocol(result.protocol).drop_seen or median + SHOWN <= beams:
        return []
    return [
        f"{name}: half of the users have {median:g} events or more, whose items may take places among the {beams} "
        f"beams, so figures of models may be too low: give num_beams {int(median) + SHOWN} or more, at most the "
        "catalogue"
    ]


def _origin(result: RunResult) -> list[str]:
    if len(result.rounds) > 1 and result.best_round == result.rounds[-1]["round"]:
        return ["the last round is the best on validation: more rounds may be better"]
    return []
