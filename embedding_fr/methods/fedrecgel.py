"""FedRecGEL: sharpness-aware minimisation on both sides of the split (Yu et al., 2026), and its wrapper of gradients.

Shape legend: A active clients of a step, B examples, N clients of the run, C clients of a block, I items, D dims, R
touched rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr.averaged import Model, averaged, received_model, score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import ExampleBatch, RoundExamples, epoch_batches, round_examples
from embedding_fr.local_training import Gradients, batch_loss
from embedding_fr.methods.entry import Method
from embedding_fr.methods.fedncf import ncf_model
from embedding_fr.mlp import layer_sizes, mlp, mlp_of_catalogue, start_mlp
from embedding_fr.optimisers import Optimiser, apply_step, fresh_state
from embedding_fr.sharpness import sharpness_aware
from embedding_fr.stacked import check_finite, take
from embedding_fr.tables import normal
from fedecider.bounds import NotNegative, Positive, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import OneOf, Real, Space, Whole


@dataclass(frozen=True)
class FedrecgelConfig:
    """Settings of FedRecGEL.

    Args:
        variant: The variant: paper trains locally and averages what is trained; code does what the public code does: a
            larger network, one step per client and round, and a server that takes the step for the shared tensors.
        private_radius: The radius of the perturbation of the user side; 0 leaves it out (w/o-non-shared).
        shared_radius: The radius of the perturbation of tables and network; 0 leaves it out (w/o-shared).
        hidden_sizes: The widths of the hidden layers between [p_u, q_i] and the logit, with commas (paper).
        server_learning_rate: The learning rate of the server's Adam, in variant code.
    """

    variant: Literal["paper", "code"] = "paper"
    private_radius: NotNegative = 0.05
    shared_radius: NotNegative = 0.05
    hidden_sizes: str = "32,16"
    server_learning_rate: Positive = 1.5

    def __post_init__(self) -> None:
        layer_sizes(self.hidden_sizes)


DEFAULTS: dict[str, Any] = {"embedding_size": 32, "local_epochs": 1, "learning_rate": 0.01}
ITEM_TABLES = tuple(f"{table}{of}" for table in ("item_table", "item_table_mlp") for of in ("", ".gradient"))
"""Of all variants; ``code`` sends gradients."""
CODE: dict[str, Any] = {
    "variant": "code",
    "learning_rate": 0.1,
    "participation": 0.1,
    "private_radius": 0.02,
    "shared_radius": 0.02,
    "server_learning_rate": 0.001,
}
"""As it runs: the released file of settings says 1.5 for the server's rate, which the code does not pass on."""
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"init_std": 0.1},
    {"init_std": 0.1, "local_epochs": 2},
    {"init_std": 0.1, "learning_rate": 0.03},
)
_RADII: Space = {
    "private_radius": Real(0.005, 0.5, log=True),
    "shared_radius": Real(0.005, 0.5, log=True),
}
SPACE: Space = {
    **TRAINING_SPACE,
    "local_epochs": Whole(1, 3),
    **_RADII,
    "item_learning_rate": OneOf((0.0, 0.001, 0.01, 0.1)),
}
CODE_SPACE: Space = {
    **{name: TRAINING_SPACE[name] for name in ("learning_rate", "init_std")},
    **_RADII,
    "server_learning_rate": Real(1e-4, 2.0, log=True),
}
"""A client takes one step a round, and its table none."""


def fedrecgel(federation: Federation, training: EmbeddingTraining, config: FedrecgelConfig) -> FederatedMethod:
    """FedNCF's score, private p_u, shared (Q, theta); the gradient of each side is that at its own worst point,
    ``g_p(p_u + rho_p g_p / ||g_p||, s)`` and ``g_s(p_u, s + rho_s g_s / ||g_s||)`` (equations 11 to 15), then Adam;
    shared tensors are averaged by train items.

    Differs from the paper: it gives neither the learning rate, nor the network, nor whether both sides move together;
    as in its public code each side moves alone, from one plain gradient.
    """
    if config.variant == "code":
        return _gradient_averaged(federation, training, config)
    model = ncf_model(federation, training, config.hidden_sizes)
    rates = dict.fromkeys((*model.shared, *model.private), training.learning_rate)
    optimiser = Optimiser("adam", {**rates, "item_table": training.item_rate}, training.weight_decay)
    model = model._replace(gradients=_sharp(model, config))
    return averaged("fedrecgel", model, federation, training, optimiser=optimiser)


def needs_server(config: FedrecgelConfig) -> bool:
    """Of the public code: its clients upload gradients, and the server takes the step."""
    return config.variant == "code"


def neumf_model(federation: Federation, training: EmbeddingTraining) -> Model:
    """NeuMF (He et al., 2017): ``w . [p * q, relu(tower([p', q']))] + b``, the tower 8 D -> 4 D -> 2 D -> D.

    ``item_table`` (I, D) and ``user`` (N, D) are multiplied; ``item_table_mlp`` (I, 4 D) and ``user_mlp`` (N, 4 D)
    enter the tower.
    """
    size = training.embedding_size

    def wide(purpose: str, count: int) -> Tensor:
        return normal(federation, training, purpose, count, 4).reshape(count, 4 * size)

    return Model(
        shared={
            "item_table": normal(federation, training, "item_table", federation.num_items),
            "item_table_mlp": wide("item_table_mlp", federation.num_items),
            **start_mlp(federation, "tower", (8 * size, 4 * size, 2 * size, size)),
            **start_mlp(federation, "output", (2 * size, 1)),
        },
        private={
            "user": normal(federation, training, "user", federation.num_clients),
            "user_mlp": wide("user_mlp", federation.num_clients),
        },
        logits=neumf_logits,
        tables=("item_table", "item_table_mlp"),
        scores=neumf_scores,
    )


def neumf_logits(params: Tree, item: Tensor | None) -> Tensor:
    """(C, B) logits of NeuMF."""
    product_CBD = take(params["item_table"], item) * params["user"][:, None]
    tower_CBD = torch.relu(mlp(params, "tower", take(params["item_table_mlp"], item), params["user_mlp"]))
    return mlp(params, "output", torch.cat([product_CBD, tower_CBD], 2))[:, :, 0]


def neumf_scores(shared: Tree, own: Tree) -> Tensor:
    """(C, I) what :func:`neumf_logits` says of all items."""
    network, mix_D = tower_to_logit(shared)
    tower_CI = mlp_of_catalogue(network, "tower", shared["item_table_mlp"], own["user_mlp"])[:, 0]
    return tower_CI.addmm_(own["user"] * mix_D, shared["item_table"].T)


def tower_to_logit(shared: Tree) -> tuple[Tree, Tensor]:
    """The tower with its part of the output as the last layer, and (D,) the output's weights of ``p * q``."""
    size, weight_F = shared["item_table"].shape[1], shared["output.0.weight"][:, 0]
    tower = {name: tensor for name, tensor in shared.items() if name.startswith("tower.")}
    last = {"tower.3.weight": weight_F[size:, None], "tower.3.bias": shared["output.0.bias"]}
    return {**tower, **last}, weight_F[:size]


def whole_batch(drawn: RoundExamples, batch_size: int) -> ExampleBatch:
    """All examples of every client at once, weighted such that the loss is the SUM of the means of its batches."""
    examples, _, place_CB = drawn
    (batch,) = epoch_batches(examples, place_CB, place_CB.shape[1], range(1))
    column_B = torch.arange(place_CB.shape[1], device=place_CB.device)
    start_B = column_B.div(batch_size, rounding_mode="floor") * batch_size
    size_CB = (examples.count_C[:, None] - start_B).clamp(max=batch_size)
    real_CB = column_B < examples.count_C[:, None]
    return batch._replace(weight_AB=torch.where(real_CB, 1.0 / size_CB.to(batch.label_AB.dtype), 0.0))


def _sharp(model: Model, config: FedrecgelConfig) -> Gradients:
    radius = {tuple(model.private): config.private_radius, tuple(model.shared): config.shared_radius}
    return sharpness_aware(radius)


def _gradient_averaged(federation: Federation, training: EmbeddingTraining, config: FedrecgelConfig) -> FederatedMethod:
    """One step per client and round on all its examples: Adam for p_u, whose moments the client keeps; the shared
    gradient is uploaded, and the server takes an Adam step along the plain mean of the gradients.

    ``local_epochs`` and ``item_learning_rate`` are not used, ``weight_decay`` for p_u alone. The loss is a sum of means
    over ``batch_size`` examples (128 in the code), so that a client weighs by its number of batches. Differs from the
    code: linear layers start as in the rest of this package.
    """
    model = neumf_model(federation, training)
    names = [*model.shared, *model.private]
    gradients = _sharp(model, config)
    private_step = Optimiser("adam", dict.fromkeys(model.private, training.learning_rate), training.weight_decay)
    shared_step = Optimiser("adam", dict.fromkeys(model.shared, config.server_learning_rate))
    zeros = {f"{name}.gradient": torch.zeros_like(tensor) for name, tensor in model.shared.items()}

    def init() -> tuple[Tree, Tree]:
        stacked = {name: tensor[None] for name, tensor in model.shared.items()}
        return {**model.shared, **fresh_state(shared_step, stacked)}, {
            **model.private,
            **fresh_state(private_step, model.private),
        }

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({name: server[name] for name in model.shared})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        own = {name: tensor.clone() for name, tensor in own.items()}
        params = {name: own[name] for name in model.private}
        batch = whole_batch(drawn, training.batch_size)
        params |= received_model(model, download, drawn.row_CR)
        gradient, logit_AB = gradients(model.objective, params, names, batch)
        loss_C = batch_loss(logit_AB, batch)
        apply_step(private_step, params, {name: gradient[name] for name in model.private}, own)
        upload = {f"{name}.gradient": gradient[name] for name in model.shared}
        tables = [f"{name}.gradient" for name in model.tables]
        loss_C = loss_C / (drawn.examples.count_C / training.batch_size).ceil()
        check_finite({**upload, **{name: params[name] for name in model.private}}, loss_C, block.clients, round)
        return (
            Upload(
                block.clients,
                block.data.num_train_C.to(loss_C.dtype),
                upload,
                rows=dict.fromkeys(tables, drawn.row_CR),
                num_rows=dict.fromkeys(tables, federation.num_items),
            ),
            own,
            [{"loss": loss} for loss in loss_C.tolist()],
        )

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        mean = weighted_mean(uploads, fallback=zeros, uniform=True)
        new = {name: tensor.clone() for name, tensor in server.items()}
        stacked = {name: new[name][None] for name in model.shared}
        apply_step(shared_step, stacked, {name: mean[f"{name}.gradient"][None] for name in model.shared}, new)
        return new

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return rank_users(score_all(model, download, own), block.data, split, federation.protocol)

    return FederatedMethod(
        "fedrecgel",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("global",),
        upload_like=lambda round, server: {f"{name}.gradient": server[name] for name in model.shared},
        fine_mean=True,
        takes_mean=True,
    )


METHOD = Method(
    FedrecgelConfig,
    fedrecgel,
    DEFAULTS,
    GRID,
    SPACE,
    needs_server=needs_server,
    equal_weights=lambda config: config.variant == "code",
    code=CODE,
    code_space=CODE_SPACE,
    item_tables=ITEM_TABLES,
)
