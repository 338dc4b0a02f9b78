"""IFedRec: new items by their attributes, which only the server sees (Zhang et al., *When Federated Recommendation
Meets Cold-Start Problem: Separating Item Attributes and User Interactions*, WWW 2024, arXiv 2305.12650).

Shape legend: N clients of the run, C clients of a block, A active clients of a step, I items, J new items, F
attributes, R touched rows, D dims, B examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from embedding_fr.averaged import Model, score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.local_training import proximal, train_epochs
from embedding_fr.methods.entry import Method, always
from embedding_fr.methods.fedncf import ncf_logits, ncf_model
from embedding_fr.methods.gpfedrec import landing_weight, plain_sgd, repeated
from embedding_fr.methods.pfedrec import (
    IN_TURN,
    code_item_rate,
    linear_model,
)
from embedding_fr.mlp import layer_sizes, mlp, start_mlp
from embedding_fr.optimisers import Optimiser, apply_step, fresh_state
from embedding_fr.stacked import check_finite, received_rows, set_rows, take
from fedecider.bounds import Epochs, NotNegative, Positive, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.search_space import OneOf, Real, Space, Whole

TABLE, BY_ATTRIBUTES, LEFT = "item_table", "attribute_table", "gap_left"
NETWORK = "network"
UNIT = "attribute_unit"
"""The root of the mean square of the run's attributes: Adam moves all weights alike, so it decides the pace."""


@dataclass(frozen=True)
class IfedrecConfig:
    """Settings of IFedRec.

    Args:
        backbone: What a client keeps to itself: pfedrec is a linear score function, fedncf a user embedding and a
            network. The public code trains fedncf with learning_rate 0.5 and alignment_weight 1.
        hidden_sizes: With fedncf: the widths of the hidden layers between [p_u, q_i] and the logit, with commas.
        alignment_weight: The weight of the regulariser that draws a client's item table to what the attributes say.
        attribute_layers: The widths of the hidden layers of the network from attributes to embeddings, with commas.
        server_learning_rate: The learning rate of that network.
        server_epochs: The number of its steps in a round, each over all items.
        attributes: What describes an item: the fields of its text with commas, such as genres or title,genres; or a
            csv file with the item in its first column and numbers in the others. If empty, all fields but the title,
            and the title where no other is known.
        text_encoder: The encoder of these texts: tfidf, minilm, or the folder of a sentence-transformers model.
    """

    backbone: Literal["pfedrec", "fedncf"] = "pfedrec"
    hidden_sizes: str = "200"
    alignment_weight: NotNegative = 10.0
    attribute_layers: str = ""
    server_learning_rate: Positive = 0.005
    server_epochs: Epochs = 1
    attributes: str = ""
    text_encoder: str = "tfidf"

    def __post_init__(self) -> None:
        layer_sizes(self.hidden_sizes)
        layer_sizes(self.attribute_layers)
        if not self.text_encoder:
            raise ValueError("got no text_encoder, expected tfidf, minilm or a sentence-transformers folder")


DEFAULTS: dict[str, Any] = {
    "learning_rate": 0.1,
    "local_epochs": 1,
    "init_std": 1.0,
    "num_negatives": 5,
    "embedding_size": 200,
}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"embedding_size": 32, "init_std": 0.1, "alignment_weight": 1.0},
    {"embedding_size": 32, "init_std": 0.1, "server_epochs": 20},
    {"backbone": "fedncf", "embedding_size": 32, "hidden_sizes": "32", "learning_rate": 0.5, "alignment_weight": 1.0},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "local_epochs": Whole(1, 3),
    "alignment_weight": Real(0.01, 30.0, log=True),
    "server_learning_rate": Real(0.001, 0.03, log=True),
    "server_epochs": OneOf((1, 5, 20)),
}


def ifedrec(federation: Federation, training: EmbeddingTraining, config: IfedrecConfig) -> FederatedMethod:
    """The server brings the attributes a_i of the items to mean square 1, maps them to ``r_i = tanh(f(a_i))`` and sends
    the table of all r_i beside the common item table q. Client u starts from q and minimises ``BCE + lambda mean((q_u -
    r)^2)``, the mean over all I D numbers; its score function stays. Then ``q <- mean_u q_u``, every client alike, and
    f takes Adam steps on ``mean((tanh(f(a)) - q)^2)`` over all items; its moments last over the rounds. A new item has
    no q: it is scored by its r (:func:`new_item_scores`). Attributes never leave the server, r does.

    A row without examples moves in closed form, ``q_u - r = g_u (q - r)`` with ``g_u = (1 - rate)^steps``. So a client
    sends its touched rows less that move, and g_u as one number; the server adds ``r - q + mean(g) (q - r)`` to all
    rows. The sum is that of whole tables.

    Variants: ``global`` scores with q, ``attributes`` with r, as if every item were new.

    Source: the public code (both of its backbones); of the paper the abstract and a summary were at hand. The code has
    one Adam step a round and, as released, no hidden layer in f; client rates and start values are those of its PFedRec
    and GPFedRec relatives (:mod:`embedding_fr.methods.pfedrec`, :mod:`embedding_fr.methods.gpfedrec`). Differs from it:
    the code takes its vectors as they are; clients draw user embeddings of their own; a regulariser that would jump
    beyond r in one step is lowered to land on it; the code scores new items only.

    Raises:
        ValueError: the federation has no attributes.
    """
    if federation.attribute_IA is None:
        raise ValueError("got a federation without attributes, expected attribute_IA, a vector for each item")
    attribute_IF = federation.attribute_IA.to(torch.get_default_dtype()).to(federation.device)
    unit = attribute_IF.square().mean().sqrt().clamp(min=torch.finfo(attribute_IF.dtype).tiny)
    if config.backbone == "pfedrec":
        model = linear_model(federation, training)
        rates = {**dict.fromkeys(IN_TURN[0], training.learning_rate), TABLE: code_item_rate(federation, training)}
        optimiser, private = Optimiser("sgd", rates, training.weight_decay, IN_TURN), model.private
    else:
        model = ncf_model(federation, training, config.hidden_sizes)
        scorer = {name: tensor for name, tensor in model.shared.items() if name != TABLE}
        optimiser = plain_sgd(federation, training, [*scorer, "user"])
        private = {**model.private, **{name: repeated(start, federation.num_clients) for name, start in scorer.items()}}
    item_rate = optimiser.learning_rate[TABLE]
    weight = landing_weight(config.alignment_weight, federation, training, item_rate)
    strength = 2.0 * weight / (federation.num_items * training.embedding_size)
    network = start_mlp(
        federation, NETWORK, (attribute_IF.shape[1], *layer_sizes(config.attribute_layers), training.embedding_size)
    )
    server_optimiser = Optimiser("adam", dict.fromkeys(network, config.server_learning_rate))

    def init() -> tuple[Tree, Tree]:
        state = fresh_state(server_optimiser, {name: tensor[None] for name, tensor in network.items()})
        table = {TABLE: model.shared[TABLE], BY_ATTRIBUTES: rows_of({**network, UNIT: unit}, attribute_IF)}
        return {**table, UNIT: unit, **network, **state}, dict(private)

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({name: server[name] for name in (TABLE, BY_ATTRIBUTES)})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        start_CRD, goal_CRD = (received_rows(download, name, drawn.row_CR) for name in (TABLE, BY_ATTRIBUTES))
        params = {**{name: tensor.clone() for name, tensor in own.items()}, TABLE: start_CRD.clone()}
        objective = model.objective._replace(penalty=proximal(goal_CRD, strength))
        loss_C = train_epochs(objective, params, drawn, training, optimiser)
        check_finite(params, loss_C, block.clients, round)
        steps_C = training.local_epochs * -(-drawn.examples.count_C // training.batch_size)
        left_C1 = ((1.0 - item_rate * strength) ** steps_C.to(loss_C.dtype))[:, None]
        sent_CRD = params[TABLE] + (1.0 - left_C1)[:, :, None] * (start_CRD - goal_CRD)
        sent = {TABLE: sent_CRD, LEFT: left_C1}
        upload = Upload(block.clients, torch.ones_like(loss_C), sent, rows={TABLE: drawn.row_CR})
        return upload, {name: params[name] for name in own}, [{"loss": loss} for loss in loss_C.tolist()]

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        mean = weighted_mean(uploads, fallback=server, uniform=True)
        if mean is server:  # nobody's upload is left
            return server
        table_ID = mean[TABLE] - (1.0 - mean[LEFT]) * (server[TABLE] - server[BY_ATTRIBUTES])
        new = {name: tensor.clone() for name, tensor in server.items()}
        for _ in range(config.server_epochs):
            params = {name: new[name][None] for name in network}
            apply_step(server_optimiser, params, network_gradients(params, attribute_IF / unit, table_ID), new)
        return {**new, TABLE: table_ID, BY_ATTRIBUTES: rows_of(new, attribute_IF)}

    def alone(round: int, kept: Tree, upload: Upload) -> NewRows:
        row_CR, moved = upload.rows[TABLE], (1.0 - upload.tensors[LEFT])[:, :, None]
        gap_CID = kept[TABLE] - kept[BY_ATTRIBUTES]
        value_CRD = upload.tensors[TABLE] - moved * take(gap_CID, row_CR.clamp(min=0))
        return {TABLE: set_rows(kept[TABLE] - moved * gap_CID, row_CR, value_CRD)}

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if variant == "attributes":
            shown = {**download.shared, **download.per_client}[BY_ATTRIBUTES]
            only = {TABLE: shown}
            download = Download(only) if BY_ATTRIBUTES in download.shared else Download({}, only)
        scored = Model({TABLE: model.shared[TABLE]}, {}, model.logits)
        return rank_users(score_all(scored, download, own), block.data, split, federation.protocol)

    return FederatedMethod(
        "ifedrec",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("global", "attributes"),
        upload_like=lambda round, server: {TABLE: server[TABLE], LEFT: server[TABLE].new_zeros(1)},
        takes_mean=True,
        alone=alone,
    )


def network_gradients(params: Tree, attribute_IF: Tensor, table_ID: Tensor) -> Tree:
    """Of ``mean((tanh(f(a)) - q)^2)`` by the network of a leading size of 1."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        loss = mse_loss(torch.tanh(mlp(leaves, NETWORK, attribute_IF[None]))[0], table_ID)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def rows_of(server: Tree, attribute_JF: Tensor) -> Tensor:
    """(J, D) ``tanh(f(a_j))`` of items by the network in a server tree."""
    params = {name: tensor[None] for name, tensor in server.items() if name.startswith(f"{NETWORK}.")}
    params = {name: tensor for name, tensor in params.items() if name.endswith((".weight", ".bias"))}
    with torch.no_grad():
        return torch.tanh(mlp(params, NETWORK, (attribute_JF / server[UNIT])[None]))[0]


def new_item_scores(server: Tree, own: Tree, attribute_JF: Tensor) -> Tensor:
    """(C, J) logits of items that no training has seen, by their attributes alone.

    ``server`` and ``own`` are the server tree of a run and its clients' rows of the local tree; ``attribute_JF`` comes
    from the source of the run's attributes.
    """
    row_JD = rows_of(server, attribute_JF)
    with torch.no_grad():
        if "user" in own:
            return ncf_logits({**own, TABLE: row_JD.expand(len(own["user"]), *row_JD.shape)}, None)
        return own["scorer.0.weight"][:, :, 0] @ row_JD.T + own["scorer.0.bias"]


METHOD = Method(
    IfedrecConfig,
    ifedrec,
    DEFAULTS,
    GRID,
    SPACE,
    equal_weights=always,
    attributes=True,
)
