"""The models that parties of the LLM track can put together from what they see: uploads, downloads, exported adapters.

Shape legend: K clients, M modules, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fedecider.audit.losses import STATISTICS
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.method import Block, Download, Tree, Upload
from fedecider.federation.privacy import protector
from fedecider.federation.state import RunState
from fedecider.federation.wire import received, take_row
from fedecider.llm.loading import load_student
from fedecider.llm.setup import Settings
from fedecider.lora.adapters import adapter_shapes, initial_adapters, module_names, stack_trees
from fedecider.lora.directions import normalise, update_norms
from fedecider.lora.export import load_adapter
from fedecider.lora.fusion import load_plain
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.running.run_folder import RunFolder
from idgen.backbone import load_backbone

SCALES = (1.0, 0.25, 0.5, 2.0, 4.0)
"""Times an update that is tried: who sees a direction does not know its size, and a larger step can show more. The
first is taken where no other client says which is best."""


class View(NamedTuple):
    """What one party sees of a client, as a model."""

    party: str
    sees: str
    load: Callable[[int, float], Any]
    """client, scale -> a model with what is seen of that client; it may be the recommender's own."""
    scales: Sequence[float] = SCALES
    statistics: Sequence[str] = STATISTICS
    """Those that mean something here."""


class Sent(NamedTuple):
    """One more round of a run: what crossed the wire."""

    round: int
    takes_mean: bool
    """Whether the server takes the plain mean, in which all clients weigh alike."""
    uploads: Sequence[Tree]
    """Of every client."""
    downloads: Sequence[Tree]
    """Client -> what it was sent before the round."""
    marks: Sequence[Tree]
    """Client -> rows of tables that it sent; no name where it sent all."""
    broadcasts: Sequence[Tree]
    """Client -> what it gets after the round: pairs, or stacks of all clients' directions."""


def send_once(settings: Settings, recommender: ClientModels, state: RunState) -> Sent:
    """Train every client once more from the selected round, bound and noise uploads as the run did, and aggregate."""
    built = METHODS[settings.run.method].build(recommender, settings.method)
    method = with_robust_mean(built, settings.run.robust_mean)
    protect = protector(method, settings.run.privacy, settings.run.seed)
    round, server, local = state.best_round + 1, state.best_server, state.best_local
    uploads: list[Upload] = []
    downloads = []
    for client in range(recommender.num_clients):
        block = Block(torch.tensor([client]), None)
        download = method.broadcast(round, server, block.clients)
        own = {name: tensor[block.clients] for name, tensor in local.items() if name not in method.unread}
        upload, _, _ = method.client_update(round, download, own, block)
        uploads.append(protect(upload, download, round, recommender.num_clients))
        downloads.append(_known(download))
    after = method.server_aggregate(round, server, iter(uploads))
    next_downloads = [method.broadcast(round + 1, after, torch.tensor([client])) for client in range(len(uploads))]
    alike = len({float(upload.weights[0]) for upload in uploads}) == 1
    return Sent(
        round,
        method.takes_mean and alike and settings.run.robust_mean == "mean",
        [take_row(upload.tensors, 0) for upload in uploads],
        downloads,
        [take_row(upload.sent_rows, 0) for upload in uploads],
        [_known(download) for download in next_downloads],
    )


def views_of(folder: RunFolder, settings: Settings, recommender: ClientModels, sent: Sent) -> list[View]:
    """What the server, another client and the holder of an adapter see; parties that see nothing are left out.

    The student, which everybody has and no member has touched, comes first: it must tell nothing.
    """
    alone = partial(_load_student, recommender)
    views = [View("nobody", "the shared student alone", alone, (1.0,), ("mean log-probability",))]
    names = list(initial_adapters(adapter_shapes(recommender.model), recommender.seed))
    pairs = [_is_pair({**down, **up}, names) for down, up in zip(sent.downloads, sent.uploads, strict=True)]
    if all(pairs) and any(sent.uploads) and not settings.run.secure_sum:
        load = partial(_load_upload, recommender, sent, names)
        views.append(View("server", "the update that the client sends", load))
    if len(sent.uploads) > 1 and all(set(names) <= set(one) for one in sent.broadcasts):
        shown = next(iter(sent.broadcasts[0].values()))
        if shown.dim() == 3:
            load = partial(_load_direction, recommender, sent, names)
            views.append(View("another client", "the client's direction, scaled to the size of its own update", load))
        else:
            load = partial(_load_broadcast, recommender, sent, names)
            views.append(View("another client", "what the server sends it after the round", load))
            if sent.takes_mean:
                load = partial(_load_rest, recommender, sent, names)
                views.append(View("another client", "the mean without its own share", load))
    if all((folder.adapters / name).is_dir() for name in recommender.names):
        load = partial(_load_exported, folder, settings, recommender)
        views.append(View("holder of the adapter", "the adapter as handed over", load, (1.0,)))
    return views


def another(client: int, num_clients: int) -> int:
    """The client that looks at ``client``: the one before or behind it, so that two silos of a catalogue look at each
    other where they stand side by side."""
    other = client + 1 if client % 2 == 0 else client - 1
    return other if other < num_clients else client - 1


def without_own(mean: Tree, own: Tree, marks: Sequence[Tree], observer: int) -> Tree:
    """``(n mean - own) / (n - 1)``, row by row where only some clients sent a row; zero where nobody else did.

    What a client of a plain mean over n can work out: with two clients, exactly what the other one sent.
    """
    rest: Tree = {}
    for name, tensor in mean.items():
        if name in marks[observer]:
            count_V = torch.stack([one[name] for one in marks]).sum(0)
            sent_V = marks[observer][name]
            others_V = (count_V - sent_V.to(count_V)).to(tensor)
            mine = torch.where(sent_V[:, None], own[name], torch.zeros_like(tensor))
            left = count_V.to(tensor)[:, None] * tensor - mine
            rest[name] = torch.where(others_V[:, None] > 0, left / others_V.clamp(min=1.0)[:, None], 0.0)
        else:
            rest[name] = (len(marks) * tensor - own[name]) / (len(marks) - 1)
    return rest


def scaled(pair: Tree, scale_M: Sequence[float]) -> Tree:
    """The pair whose update ``B A`` of each module is that many times as large."""
    found = dict(pair)
    for name, scale in zip(module_names(pair), scale_M, strict=True):
        found[f"{name}.lora_b"] = pair[f"{name}.lora_b"] * scale
    return found


def _known(download: Download) -> Tree:
    """What the only client of a download knows of it."""
    one = received(download, 0)
    return {**one.shared, **take_row(one.per_client, 0)}


def _is_pair(tree: Tree, names: Sequence[str]) -> bool:
    return all(name in tree and tree[name].dim() == 2 for name in names)


def _pair(tree: Tree, names: Sequence[str]) -> Tree:
    return {name: tree[name] for name in names}


def _load(recommender: ClientModels, pair: Tree, scale: float) -> Any:
    load_plain(recommender.model, scaled(pair, [scale] * len(module_names(pair))))
    return recommender.model


def _load_student(recommender: ClientModels, client: int, scale: float) -> Any:
    load_student(recommender)
    return recommender.model


def _load_upload(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    """The upload; a factor that is not trained was downloaded."""
    pair = _pair({**sent.downloads[client], **sent.uploads[client]}, names)
    return _load(recommender, pair, scale)


def _load_broadcast(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    observer = another(client, len(sent.uploads))
    return _load(recommender, _pair(sent.broadcasts[observer], names), scale)


def _load_rest(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    observer = another(client, len(sent.uploads))
    mean, own = (
        _pair({**sent.downloads[observer], **tree[observer]}, names) for tree in (sent.broadcasts, sent.uploads)
    )
    return _load(recommender, without_own(mean, own, sent.marks, observer), scale)


def _load_direction(recommender: ClientModels, sent: Sent, names: Sequence[str], client: int, scale: float) -> Any:
    """The client's direction as the observer got it, in the size that the observer's own update has, per module."""
    observer = another(client, len(sent.uploads))
    own = stack_trees([_pair({**sent.downloads[observer], **sent.uploads[observer]}, names)])
    direction = normalise({name: sent.broadcasts[observer][name][client][None] for name in names})
    size_M = update_norms(own)[0] * scale
    load_plain(recommender.model, scaled(take_row(direction.tree, 0), size_M.tolist()))
    return recommender.model


def _load_exported(folder: RunFolder, settings: Settings, recommender: ClientModels, client: int, scale: float) -> Any:
    base = load_backbone(folder.backbone, recommender.tokenizer, settings.run.quantize, recommender.device)
    return load_adapter(base, folder.adapters / recommender.names[client]).to(recommender.device).eval()
