"""What the settings of a method owe to the commands, and what it says of them to a search."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedecider.comparison.search import value_of, with_setting
from fedecider.federation.method import RowUpdate, Tree, Upload
from fedecider.federation.registry import RESERVED
from fedecider.federation.wire import check_upload, dense, measure, message, take_row, upload_of
from fedecider.running.options import from_plain
from fedecider.running.plain import as_plain
from fedecider.search_space import OneOf, Range, Real, Setting, Whole
from fedecider.testing.bench import Bench, alike, differing, global_generators, require, require_same, updated

# What the settings of a method owe to the commands, and what it says of them to a search.


def settings(bench: Bench) -> None:
    """The settings are a frozen dataclass with a default and a help text for each, and the grid is made of settings."""
    config, entry = bench.entry.config, bench.entry
    frozen = is_dataclass(config) and getattr(config, "__dataclass_params__").frozen  # noqa: B009 (mypy lacks it)
    require(frozen, f"{config.__name__} is no frozen dataclass")
    own = {field.name for field in fields(config)}
    docs = "\n".join(inspect.getdoc(one) or "" for one in config.__mro__ if is_dataclass(one))  # as --help reads them
    told = set(re.findall(r"\n    (\w+): \S", docs))
    require(own <= told, f"{config.__name__} has no help text for {sorted(own - told)}: give them below Args:")
    common = {field.name for one in bench.common_settings() for field in fields(one)}
    taken = common | {*RESERVED}
    require(not own & taken, f"{sorted(own & taken)} of {config.__name__} are names of common settings")
    for setting in entry.grid:
        unknown = sorted({name.partition(".")[0] for name in setting} - own - common)
        require(not unknown, f"the grid has {unknown}, which are no settings")
        problem = _refused(bench, setting)
        require(not problem, f"the grid has {setting}, which the settings refuse: {problem}")


def space(bench: Bench) -> None:
    """What a search may draw are settings, in ranges of `fedecider.bounds` whose values they accept."""
    blocks, before = _blocks(bench), [""]
    for name, one in bench.entry.space.items():
        require(getattr(one, "of", "") in before, f"the space has {one!r} for {name}, expected of a setting before it")
        before.append(name)
        try:
            value_of(blocks, name)
        except ValueError as error:
            raise AssertionError(f"the space has {name!r}, which is no setting") from error
        require(
            isinstance(one, (Real, Whole, OneOf)),
            f"the space has {one!r} for {name}, expected Real, Whole or OneOf of fedecider.bounds",
        )
        require(not _wrong(one), f"the space has {one!r} for {name}, expected {_wrong(one)}")
        for value in _tried(one):
            problem = _refused(bench, {name: value})
            require(not problem, f"the space may draw {name} {value!r}, which the settings refuse: {problem}")


def _blocks(bench: Bench) -> tuple[Any, ...]:
    """The settings of a run by default, the method's own first."""
    return (bench.entry.config(), *(one() for one in bench.common_settings()))


def _refused(bench: Bench, setting: Setting) -> str:
    """Why the settings cannot have these values, also when a file says them; empty where they can."""
    try:
        for block in with_setting(_blocks(bench), setting):
            if any(name.partition(".")[0] in {field.name for field in fields(block)} for name in setting):
                from_plain(type(block), as_plain(block))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _wrong(one: Range) -> str:
    """What is expected of a range that cannot be drawn from; empty where it can."""
    if isinstance(one, OneOf):
        return "" if len(one.values) else "one value at least"
    if not (math.isfinite(one.least) and math.isfinite(one.most) and one.least < one.most):
        return "two finite ends, the smaller one first"
    if one.log and one.least <= 0:
        return "ends above 0, since the range is logarithmic"
    if isinstance(one, Whole):
        return "" if one.holds(one.least) and one.holds(one.most) else "whole numbers as ends"
    inside = all(one.holds(_three_digits(end)) for end in (one.least, one.most))
    return "" if inside else "ends of at most three digits, as drawn numbers have"


def _tried(one: Range) -> Sequence[Any]:
    """Both ends of a range and, of real numbers, one in between; all values where there are no ends."""
    if isinstance(one, OneOf):
        return one.values
    if isinstance(one, Whole):
        return (one.least, one.most)
    between = math.sqrt(one.least * one.most) if one.log else one.least + 0.382 * (one.most - one.least)
    return (float(one.least), _three_digits(between), float(one.most))


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


# What a method of either track owes to the runner; each function takes a bench and raises ``AssertionError``.

Contract = Callable[[Bench], None]


def trees(bench: Bench) -> None:
    """What the run starts from are two flat dicts of tensors, and every local one leads with a row per client."""
    method = bench.build()
    require(
        bool(method.variants) and len({*method.variants}) == len(method.variants),
        "variants must be names, each one once",
    )
    server, local = method.init()
    for side, tree in (("server", server), ("local", local)):
        wrong = [name for name, tensor in tree.items() if not isinstance(tensor, Tensor)]
        require(not wrong, f"the {side} tree holds {wrong}, which are no tensors")
    short = [name for name, tensor in local.items() if tensor.shape[:1] != (bench.num_clients,)]
    require(not short, f"the local tensors {short} do not lead with one row per client ({bench.num_clients})")


def uploads(bench: Bench) -> None:
    """An upload leads with a row per client, shares no name with the local tree, and comes with new rows and logs."""
    method = bench.build()
    server, local = method.init()
    for size in (1, bench.num_clients):
        for block in bench.blocks(size):
            _, upload, new, logs = updated(method, 1, block, server, local)
            leaked = sorted(set(upload.tensors) & set(local))
            require(
                not leaked,
                f"the upload has {leaked}, names of the local tree: what is local never leaves a client. "
                "Use another name for what is sent",
            )
            for name, tensor in upload.tensors.items():
                require(
                    tensor.shape[:1] == upload.clients.shape,
                    f"the upload {name} has the shape {tuple(tensor.shape)} for {len(upload.clients)} clients: it must "
                    "lead with a row per client of the block",
                )
            check_upload(upload, local, block.clients)
            require(bool((upload.weights >= 0).all()), "client weights must not be negative")
            require(set(new) <= set(local), f"new own rows {sorted(set(new) - set(local))} are not in the local tree")
            for name, rows in new.items():
                lead = (rows.rows if isinstance(rows, RowUpdate) else rows).shape[:1]
                require(lead == upload.clients.shape, f"the new own rows {name} do not lead with a row per client")
            require(len(logs) == len(upload.clients), f"{len(logs)} logs for {len(upload.clients)} clients")
            json.dumps(logs)


def upload_like(bench: Bench) -> None:
    """``upload_like`` tells names, shapes and kinds of number of what a client sends, in every round."""
    method = bench.build()
    if method.upload_like is None:
        return
    state, _ = bench.reference(1)
    for round, server, local in ((1, *method.init()), (2, state.server, state.local)):
        block = bench.blocks(1)[0]
        download, upload, _, _ = updated(method, round, block, server, local)
        sent = take_row(dense(upload, download).tensors, 0)
        like = method.upload_like(round, server)
        wrong = [name for name in {*sent, *like} if name not in sent or name not in like]
        wrong += [
            name
            for name in {*sent} & {*like}
            if (sent[name].shape, sent[name].dtype) != (like[name].shape, like[name].dtype)
        ]
        require(not wrong, f"upload_like is not what is sent in round {round}: {sorted(wrong)}")


def same_seed_same_bits(bench: Bench) -> None:
    """The seed alone decides: another process, with other global generators, gets the same bits."""
    states = []
    for seed in (98, 99):
        with global_generators(seed) as drawn:
            method = bench.build(**bench.random)
            drawn()  # models are made with a global generator, before they get their weights
            states.append(bench.run(method, 2)[0])
            found = drawn()
        require(
            not found,
            f"it draws from the global generator of {', '.join(found)}: draw from "
            'fedecider.federation.streams.stream(seed, "purpose", ..., round)',
        )
    require_same(
        states[0], states[1], "two runs with the same seed are not equal: it draws from something else than the seed"
    )
    if bench.trains_on_draws:
        other, _ = bench.run(bench.build(seed=4, **bench.random), 2)
        moved = differing(states[0].server, other.server) + differing(states[0].local, other.local)
        require(bool(moved), "another seed changes nothing: it does not draw from the seed it is built with")


def no_hidden_state(bench: Bench) -> None:
    """What is kept is in the two trees: the same functions give the same again, whatever they were asked before."""
    method = bench.build()
    first, _ = bench.run(method, 2)
    again, _ = bench.run(method, 2)
    sentence = "a second run with the same functions is not the first one again: they remember something outside trees"
    require_same(first, again, sentence)


def resume(bench: Bench) -> None:
    """A run that is stopped and goes on from its files gives the bits of an uninterrupted one."""
    whole, _ = bench.reference(3)
    with TemporaryDirectory() as folder:
        bench.run(bench.build(), 2, checkpoints=Path(folder))
        resumed, records = bench.run(bench.build(), 3, checkpoints=Path(folder), resume=True)
    require([record["round"] for record in records] == [3], "the resumed run did other rounds than the third")
    sentence = "a resumed run is not the uninterrupted one: something that matters is outside the two trees"
    require_same(whole, resumed, sentence)


def block_size(bench: Bench) -> None:
    """How many clients share a block changes no result, no record and no byte."""
    with bench.precision():
        single, first = bench.run(bench.build(), 3, block_size=1)
        together, second = bench.run(bench.build(), 3, block_size=bench.num_clients)
    sentence = "clients that share a block give another result than clients in blocks of their own"
    require_same(single, together, sentence, bench.tolerance)
    for one, other in zip(first, second, strict=True):
        require(one["traffic"] == other["traffic"], f"{sentence} (in bytes)")
        require(abs(one["score"] - other["score"]) <= 1e-6, f"{sentence} (in validation scores)")
        for left, right in zip(one["clients"], other["clients"], strict=True):
            require(_same_log(left, right), f"{sentence} (in the log of client {left['client']})")


def _same_log(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """To rounding, and seconds apart."""
    if left.keys() != right.keys():
        return False
    return all(_same_value(left[name], right[name]) for name in left if not name.endswith("seconds"))


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, (str, type(None))):
        return bool(left == right)
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (left, right))
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def own_data_alone(bench: Bench) -> None:
    """What a client sends depends on its own data and its download, not on who else takes part in the round."""
    with bench.precision():
        state, _ = bench.run(bench.build(), 1)
        (together,) = bench.blocks(bench.num_clients)
        method = bench.build()
        sent: dict[int, list[Tree]] = {}
        for blocks in ([together], bench.blocks(1)):
            for block in blocks:
                download, upload, _, _ = updated(method, 2, block, state.server, state.local)
                whole = dense(upload, download)
                for row, client in enumerate(upload.clients.tolist()):
                    sent.setdefault(client, []).append(take_row(whole.tensors, row))
    for client, (company, alone) in sent.items():
        wrong = differing(company, alone, bench.tolerance)
        require(not wrong, f"client {client} sends other {wrong} in company than alone")


def absent_clients(bench: Bench) -> None:
    """Who takes no part in a round keeps what it has, unless the method says that it needs everyone, and stops."""
    method = bench.build()
    if bench.needs_everyone:
        try:
            bench.run(method, 1, participation=0.5)
        except ValueError:
            return
        raise AssertionError("needs_everyone says that nobody may be absent, and the method goes on all the same")
    before = {name: tensor.clone() for name, tensor in method.init()[1].items()}
    state, records = bench.run(method, 1, participation=0.3)
    present = {log["client"] for log in records[0]["clients"]}
    for name, tensor in state.local.items():
        for client in sorted(set(range(bench.num_clients)) - present):
            require(alike(tensor[client], before[name][client]), f"client {client} was absent, and its {name} changed")


def arguments_stay(bench: Bench) -> None:
    """No function writes into the trees, the download or the data that it is given."""
    method = bench.build()
    state, _ = bench.reference(1)
    server = {name: tensor.clone() for name, tensor in state.server.items()}
    (block,) = bench.blocks(bench.num_clients)
    data = [tensor.clone() for tensor in _tensors(block.data)]
    download = method.broadcast(2, server, block.clients)
    shared = {name: tensor.clone() for name, tensor in {**download.shared, **download.per_client}.items()}
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    read = {name: tensor for name, tensor in own.items() if name not in method.unread}
    given = {name: tensor.clone() for name, tensor in read.items()}
    upload, _, _ = method.client_update(2, download, read, block)
    wrong = differing(read, given)
    require(not wrong, f"client_update writes into the own rows {wrong} that it is given: clone them first")
    wrong = differing({**download.shared, **download.per_client}, shared)
    require(not wrong, f"client_update writes into its download ({wrong}), which all clients share: clone it first")
    sent = {name: tensor.clone() for name, tensor in upload.tensors.items()}
    method.server_aggregate(2, server, iter([upload]))
    require(not differing(upload.tensors, sent), "server_aggregate writes into an upload")
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    before = {name: tensor.clone() for name, tensor in own.items()}
    for variant in method.variants:
        method.positions(variant, method.broadcast(2, server, block.clients), own, block, "valid")
    require(not differing(own, before), "positions writes into the own rows that it is given")
    wrong = differing(server, state.server)
    require(not wrong, f"the server's {wrong} are written in place, expected new tensors from server_aggregate")
    same = all(torch.equal(one, other) for one, other in zip(data, _tensors(block.data), strict=True))
    require(same, "it writes into the clients' data")


def _tensors(data: Any) -> list[Tensor]:
    """The tensors of a block's data, which is a tuple of tensors and of dicts of them, or nothing."""
    if isinstance(data, Tensor):
        return [data]
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def one_stream(bench: Bench) -> None:
    """The server reads the uploads once, as a stream: it asks neither for their number nor for a second look."""
    method = bench.build()
    server, local = method.init()
    sent = [updated(method, 1, block, server, local)[1] for block in _in_order(bench)]
    listed = method.server_aggregate(1, server, list(sent))  # a list can be read twice
    try:
        streamed = method.server_aggregate(1, server, (upload for upload in sent))
    except TypeError as error:
        raise AssertionError(f"server_aggregate cannot read the uploads as a stream ({error})") from error
    wrong = differing(listed, streamed)
    require(not wrong, f"the server's {wrong} are others when uploads come as a stream: it reads them more than once")


def _in_order(bench: Bench) -> list[Any]:
    """Blocks of one in client order."""
    return sorted(bench.blocks(1), key=lambda block: int(block.clients[0]))


def non_finite_uploads(bench: Bench) -> None:
    """An upload with a number that is not finite leaves the server as if its client had not been heard."""
    with bench.precision():
        method = bench.build()
        server, local = method.init()
        sent: list[Upload] = [updated(method, 1, block, server, local)[1] for block in _in_order(bench)]
        # Whole numbers are always finite, and a method that needs everyone has nothing to go on with.
        poisoned = {} if bench.needs_everyone else _poisoned(sent[1])
        if not poisoned:
            return
        expected = method.server_aggregate(1, server, iter([sent[0], *sent[2:]]))
        for what, upload in poisoned.items():
            after = method.server_aggregate(1, server, iter([sent[0], upload, *sent[2:]]))
            wrong = differing(after, expected, bench.tolerance)
            require(
                not wrong,
                f"the server's {wrong} are others after an upload with {what} than without its client: leave such "
                "clients out as a whole, as fedecider.federation.aggregate.weighted_mean does",
            )


def _poisoned(upload: Upload) -> dict[str, Upload]:
    """What is not finite -> the upload with it: all numbers, or a single one of each tensor."""
    tensors = {name: tensor for name, tensor in upload.tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if not tensors:
        return {}
    found = {
        f"{value} everywhere": {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}
        for value in (torch.nan, torch.inf, -torch.inf)
    }
    for name, tensor in tensors.items():
        one = tensor.flatten().clone()
        one[-1] = torch.inf
        found[f"one inf in {name}"] = {name: one.view(tensor.shape)}
    return {what: upload._replace(tensors={**upload.tensors, **changed}) for what, changed in found.items()}


def unsent_rows(bench: Bench) -> None:
    """A row that a client does not send is nobody's: what the server makes of the others' does not depend on it."""
    found = bench.by_rows()
    if found is None:
        return
    method, blocks = found
    server, local = method.init()
    sent: list[Upload] = [updated(method, 1, block, server, local)[1] for block in blocks]
    whole = method.server_aggregate(1, server, iter(sent))
    for place, left_out in enumerate(sent):
        others = [upload for upload in sent if upload is not left_out]
        without = method.server_aggregate(1, server, iter(others))
        for name, mark_Cn in left_out.sent_rows.items():
            if whole.get(name, mark_Cn[0]).dim() != left_out.tensors[name].dim() - 1:
                continue  # the server keeps every client's by itself
            theirs_n = torch.cat([upload.sent_rows[name] for upload in others]).any(0) & ~mark_Cn[0]
            require(
                alike(whole[name][theirs_n], without[name][theirs_n], 1e-6),
                f"client {place} does not send some rows of {name}, and they are others with it than without it: its "
                "zeros there are no numbers. Take the mean over those whose sent_rows mark the row, as "
                "fedecider.federation.aggregate.weighted_mean does",
            )


def bytes_counted(bench: Bench) -> None:
    """What the record says of the bytes of a client is the size of the messages that it would get and send."""
    method = bench.build()
    server, local = method.init()
    for block in bench.blocks(1):
        download, upload, _, _ = updated(method, 1, block, server, local)
        for name, size_C in upload.payload.items():
            counted = (
                size_C.shape == upload.clients.shape and not size_C.is_floating_point() and bool((size_C >= 0).all())
            )
            require(counted and name in upload.tensors, f"the payload of {name} is no number of bytes for each client")
        (traffic,) = measure(download, upload)
        if not download.payload:
            down = len(save(_plain(message(download, 0)))) if message(download, 0) else 0
            require(traffic.bytes_down == down, f"{traffic.bytes_down} bytes down are counted, and {down} are sent")
        if not upload.payload:
            one = dense(upload_of(upload, 0), download)
            marks = take_row(one.sent_rows, 0)
            tree = {
                name: tensor[marks[name]] if name in marks else tensor
                for name, tensor in take_row(one.tensors, 0).items()
            }
            up = len(save(_plain(tree))) if tree else 0
            require(traffic.bytes_up == up, f"{traffic.bytes_up} bytes up are counted, and {up} are sent")


def _plain(tree: Tree) -> Tree:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tree.items()}


def positions(bench: Bench) -> None:
    """Every variant gives, for each client, the 0-based place of each of its held-out items, on both splits."""
    method, state = bench.build(), bench.trained()
    places: dict[str, set[int]] = {variant: set() for variant in method.variants}
    for size in (1, bench.num_clients):
        for block in bench.blocks(size):
            download = method.broadcast(2, state.server, block.clients)
            own = {name: tensor[block.clients] for name, tensor in state.local.items()}
            for variant in method.variants:
                for split in ("valid", "test"):
                    found = method.positions(variant, download, own, block, split)
                    require(len(found) == len(block.clients), f"{variant}: {len(found)} lists for {len(block.clients)}")
                    for place_U, client in zip(found, block.clients.tolist(), strict=True):
                        expected = bench.num_places(client)
                        shape = tuple(place_U.shape)
                        require(
                            shape == (expected,),
                            f"{variant}, client {client}, {split}: places have the shape {shape}, expected "
                            f"({expected},)",
                        )
                        require(bool((place_U >= 0).all()), f"{variant}, client {client}: a place below 0, or NaN")
                        places[variant].update(place_U.tolist())
    for variant, seen in places.items():  # after one round of the tiny setting no model is so good that all are first
        sentence = f"{variant} gives every held-out item of every client the place {min(seen)}"
        require(len(seen) > 1, f"{sentence}: count the items that score higher")


SHARED: tuple[Contract, ...] = (
    settings,
    space,
    trees,
    uploads,
    upload_like,
    positions,
    bytes_counted,
    unsent_rows,
    one_stream,
    non_finite_uploads,
    same_seed_same_bits,
    no_hidden_state,
    arguments_stay,
    own_data_alone,
    block_size,
    absent_clients,
    resume,
)
QUICK: tuple[Contract, ...] = (
    settings,
    space,
    trees,
    uploads,
    bytes_counted,
    unsent_rows,
    one_stream,
    non_finite_uploads,
    arguments_stay,
)
"""What a first look is at: no run of rounds."""
