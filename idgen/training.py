"""How far a training is, kept on disk: one that was killed goes on from there and ends with the same weights."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedecider.bounds import Diverged, Precision, Schedule
from idgen.backbones.families import family_of, unwrap
from idgen.backbones.family import (
    Family,
    Predictions,
    TokenBatch,
    evaluating,
    labels_of,
    num_samples_of,
    output_rows,
)
from idgen.config import TrainConfig
from idgen.precision import autocast
from idgen.trie import IGNORED_LABEL, Forest, log_softmax_of_rows

# How far a training is, kept on disk: one that was killed goes on from there and ends with the same weights.

EVERY_S = 300.0
"""Seconds between two checkpoints: what a kill costs at most. Trainings that are shorter write none."""


@dataclass
class Position:
    """How far a training is."""

    epoch: int = 0
    step: int = 0
    batches: int = 0
    """Steps of the epoch that are done."""
    loss: float = 0.0
    """Sum over the steps of the epoch."""
    first_loss: float | None = None
    """Mean of its first window (`LossGuard`)."""
    samples: int = 0
    seconds: float = 0.0
    logs: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    """Of validation: step, as JSON names it -> mean gain."""


@dataclass
class Best:
    """The best of what validation has seen before the last step."""

    step: int
    gain_U: Tensor
    parameters: list[Tensor]
    """On the CPU, in the order of `parameters_of`."""


class Checkpoint:
    """The file of one training: its position, trained parameters, optimiser and the state of the random generators;
    with validation the best weights as well.

    Whoever trains with other settings, data or models has to take another path. Batches are not kept: an epoch's are
    drawn again, and those that were trained on are passed over.
    """

    def __init__(self, path: Path, every_s: float | None = None) -> None:
        """``every_s``: instead of `EVERY_S`."""
        self.path, self.every_s = path, EVERY_S if every_s is None else every_s
        self._last = time.monotonic()

    def write_if_due(
        self, at: Position, optimizer: torch.optim.Optimizer, device: torch.device, best: Best | None = None
    ) -> None:
        """Write where the last one is ``every_s`` seconds ago; nothing half-written ever has the file's name."""
        if time.monotonic() - self._last < self.every_s:
            return
        tensors = {f"parameter.{i}": one.detach() for i, one in enumerate(parameters_of(optimizer))}
        for i, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": one for name, one in moments.items()}
        tensors["generator"] = torch.get_rng_state()
        if device.type == "cuda":
            tensors["device_generator"] = torch.cuda.get_rng_state(device)
        if best is not None:
            tensors |= {f"best.{i}": one for i, one in enumerate(best.parameters)}
            tensors |= {"best_step": torch.tensor(best.step), "best_gain": best.gain_U}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, scratch, {"position": json.dumps(vars(at))}
        )
        os.replace(scratch, self.path)
        self._last = time.monotonic()

    def read(self, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Position, Best | None]:
        """Put everything back as it was, all but the best weights; the beginning where there is no file.

        Raises:
            ValueError: the file is damaged, or of another model.
        """
        if not self.path.is_file():
            return Position(), None
        advice = f"Delete {self.path.parent}, and the training starts anew"
        try:
            with safe_open(str(self.path), "pt") as file:
                told = json.loads(file.metadata()["position"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            found, generator = _group(tensors, "parameter"), tensors["generator"]
            at = Position(**told)
            best = None
            if "best_step" in tensors:
                best = Best(int(tensors["best_step"]), tensors["best_gain"], _group(tensors, "best"))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"got a damaged {self.path}, expected a checkpoint of a training. {advice}") from error
        trained = parameters_of(optimizer)
        shapes = [parameter.shape for parameter in trained]
        if any([one.shape for one in of_model] != shapes for of_model in (found, best.parameters if best else found)):
            raise ValueError(f"got {self.path} of another model, expected parameters of the same shapes. {advice}")
        with torch.no_grad():
            for parameter, one in zip(trained, found, strict=True):
                parameter.copy_(one)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": _moments(tensors)})
        torch.set_rng_state(generator)
        if device.type == "cuda" and "device_generator" in tensors:
            torch.cuda.set_rng_state(tensors["device_generator"], device)
        return at, best


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All that it trains, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _group(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """``name.0``, ``name.1``, ... in this order."""
    return [tensors[f"{name}.{i}"] for i in range(sum(key.startswith(f"{name}.") for key in tensors))]


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Parameter -> what AdamW keeps of it."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        if kind == "optimizer":
            number, _, name = rest.partition(".")
            found.setdefault(int(number), {})[name] = tensor
    return found


# One training loop for backbone, ID generator and local clients, and the loss of a model that writes item IDs.

LossFn = Callable[[TokenBatch], Tensor]
OnStep = Callable[[int, int, str], None]
"""done, total, note: called after every step."""

MAX_LOGITS = 2**26
"""Logits that exist at a time in training: 256 MiB in fp32, and as much for their gradients."""
NOTE_EVERY = 20
"""Steps between two readings of the loss, which make an accelerator wait, and between places to go on from."""


ADAM_EPSILON = 1e-6
"""Of stages 1 and 2, as in IDGenRec."""
CLIP_NORM = 1.0
"""The largest gradient norm: of everything together, or of each group by itself."""


class Course(NamedTuple):
    """What is no setting of a training of ``total_steps`` steps."""

    schedule: Schedule
    """Down to 0 at the end."""
    warmup: Callable[[int], int]
    """total steps -> those in which the learning rate rises from 0."""
    weight_decay: float
    """Decoupled; norms and biases have none."""
    beta2: float
    """AdamW's decay rate of the squared gradients."""
    dropout: float | None
    """None: the model's own."""


# beta2 0.98 adapts faster in short runs, and the short ones need a tenth of their steps to warm up.
STAGE_ONE_COURSE = Course(
    "cosine",
    lambda total: max(round(0.05 * total), min(12, round(0.1 * total))),
    weight_decay=0.01,
    beta2=0.98,
    dropout=None,
)

DISTILL_COURSE = Course("linear", lambda total: round(0.05 * total), weight_decay=0.0, beta2=0.999, dropout=0.0)
"""Dropout would only add noise to what a block is to return."""


NEGATIVES = 1
"""A purpose of `epoch_generator`."""


def epoch_generator(seed: int, epoch: int, *purpose: int) -> torch.Generator:
    """A random stream of its own for every epoch, and for every purpose but the samples and their order."""
    word = int(np.random.SeedSequence([seed, epoch, *purpose]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(word >> 1)


def sequence_loss(model: Any, batch: TokenBatch) -> Tensor:
    """Mean cross-entropy in nats over the target tokens of a batch; labels of -100 do not count.

    ``model``: of any family, plain or wrapped by PEFT. Logits are computed for counting tokens only, and no more than
    `MAX_LOGITS` exist at a time: all of the vocabulary, or the tokens of ``catalogue`` in the batch. ``log_weights`` in
    the batch are added to all of them but the target's. With ``node`` in the batch it is `trie_loss`.
    """
    family, base = family_of(model), unwrap(model)
    return predictions_loss(family, base, family.predictions(base, batch), batch)


def predictions_loss(family: Family, base: Any, predictions: Predictions, batch: TokenBatch) -> Tensor:
    """`sequence_loss` of a model that has run on ``batch``."""
    hidden_RD, target_R = predictions
    if "node" in batch:
        return trie_loss(family, base, hidden_RD, target_R, batch)
    token_C = batch.get("catalogue")
    if token_C is not None:
        target_R = torch.searchsorted(token_C, target_R)

    weight_BC = batch.get("log_weights")
    row_R = (labels_of(batch) != IGNORED_LABEL).nonzero()[:, 0] if weight_BC is not None else target_R

    def loss(rows_RD: Tensor, targets_R: Tensor, row_R: Tensor) -> Tensor:
        logit_RC = family.token_logits(base, rows_RD, token_C)
        if weight_BC is not None:
            logit_RC = logit_RC + weight_BC[row_R].scatter_(1, targets_R[:, None], 0.0)
        return F.cross_entropy(logit_RC, targets_R)

    num_logits = base.config.vocab_size if token_C is None else len(token_C)
    return mean_in_pieces(loss, num_logits, hidden_RD, target_R, row_R)


DENSE_ABOVE = 512
"""Children of a node above which the logits of all of them are one product for all its rows, as at a root."""


def trie_loss(family: Family, model: Any, hidden_RD: Tensor, target_R: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over the target items of -log p(ID), in nats; p(ID) is the product over its tokens of their probabilities
    among the tokens that may follow in the trie.

    So no probability is spent on what is no item, and a token that the trie leaves no choice costs nothing. It is
    what constrained decoding ranks by (`idgen.decode`): a hierarchical softmax (Morin and Bengio 2005) along the
    IDs. Differs from IDGenRec (SIGIR 2024), which trains on all of the vocabulary.
    """
    forest = Forest(batch["first_child"], batch["child_token"])
    node_R = batch["node"][labels_of(batch) != IGNORED_LABEL]
    num_R = forest.num_children(node_R)
    total = hidden_RD.new_zeros((), dtype=torch.float32)
    for node in node_R[num_R > DENSE_ABOVE].unique():
        rows_R = node_R == node
        token_C = forest.children(node[None]).token_C

        def loss(rows_RD: Tensor, place_R: Tensor, token_C: Tensor = token_C) -> Tensor:
            return F.cross_entropy(family.token_logits(model, rows_RD, token_C), place_R)

        place_R = torch.searchsorted(token_C, target_R[rows_R])
        total = total + mean_in_pieces(loss, len(token_C), hidden_RD[rows_R], place_R) * len(place_R)
    open_R = (num_R > 1) & (num_R <= DENSE_ABOVE)
    if bool(open_R.any()):
        child = forest.children(node_R[open_R])
        token_U, place_C = child.token_C.unique(return_inverse=True)
        rows_UD = output_rows(model.lm_head, token_U)
        scaled_RD = hidden_RD[open_R] * family.output_scale(model)
        logit_C = (scaled_RD[child.row_C] * rows_UD[place_C]).sum(1).float()
        is_own_C = child.token_C == target_R[open_R][child.row_C]
        total = total - log_softmax_of_rows(logit_C, child.row_C, int(open_R.sum()))[is_own_C].sum()
    return total / forest.is_root(node_R).sum().clamp(min=1)


def mean_in_pieces(loss: Callable[..., Tensor], vocab_size: int, *rows: Tensor) -> Tensor:
    """``loss(*rows)``, a mean over their R rows, with at most `MAX_LOGITS` logits at a time.

    More are computed piece by piece, and again in the backward pass.
    """
    rows_at_once = max(1, MAX_LOGITS // vocab_size)
    if len(rows[0]) <= rows_at_once:
        return loss(*rows)
    pieces = zip(*(part.split(rows_at_once) for part in rows), strict=True)
    means = [cast(Tensor, checkpoint(loss, *piece, use_reentrant=False)) * len(piece[0]) for piece in pieces]
    return torch.stack(means).sum() / len(rows[0])


def parameter_groups(
    model: nn.Module, learning_rate: float, course: Course, table_lr_multiplier: float = 1.0
) -> list[dict[str, Any]]:
    """Trainable parameters of ``model`` for AdamW: weights with decay; norms and biases, by class, without.

    Token embeddings are a group of their own where ``table_lr_multiplier`` is not 1.
    """
    table = model.get_input_embeddings().weight if table_lr_multiplier != 1.0 else None  # type: ignore[operator]
    kept_whole = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter is not table:
            whole = id(parameter) in kept_whole or name.endswith("bias")
            (kept if whole else decayed).append(parameter)
    tables = [table] if table is not None and table.requires_grad else []
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": course.weight_decay},
        {"params": kept, "weight_decay": 0.0},
        {"params": tables, "weight_decay": course.weight_decay, "lr": learning_rate * table_lr_multiplier},
    ]
    return [group for group in groups if group["params"]]


def learning_rate_factor(step: int, total_steps: int, course: Course) -> float:
    """Factor on the learning rate in step 0 .. ``total_steps - 1``."""
    warmup = course.warmup(total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return decay(course.schedule, (step - warmup) / max(1, total_steps - warmup))


def decay(schedule: Schedule, progress: float) -> float:
    """Factor on a learning rate after a share of the steps, from 1 at 0; at 1 it is 0 unless it is constant."""
    if schedule == "constant":
        return 1.0
    return 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


class RowAdamW(torch.optim.AdamW):
    """AdamW that moves, of a parameter whose gradient is one of rows, the rows that the step touched alone.

    Such a parameter has no first moment (beta1 is 0) and no weight decay: a row without a gradient then stands still,
    and what its second moment has lost meanwhile is made up when the row is touched next. So a step costs what it
    touches, and gives what AdamW with beta1 0 gives to the whole table.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self._step_rows(parameter, group)
                    parameter.grad = None
        return super().step(closure)

    def _step_rows(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad.coalesce(), self.state[parameter]  # type: ignore[union-attr]
        row_T, gradient_TD = gradient.indices()[0], gradient.values()
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["row_step"] = torch.zeros(len(parameter), device=parameter.device)
        state["step"] += 1
        step, beta2 = state["step"], group["betas"][1]
        decayed_T = beta2 ** (step - state["row_step"][row_T])
        square_TD = state["exp_avg_sq"][row_T] * decayed_T[:, None]
        square_TD.addcmul_(gradient_TD, gradient_TD, value=1 - beta2)
        state["exp_avg_sq"][row_T], state["row_step"][row_T] = square_TD, step
        root_TD = square_TD.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        parameter.index_add_(0, row_T, gradient_TD / root_TD, alpha=-group["lr"])


@contextmanager
def row_gradients(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, where ``wanted``, tables that are read by rows have gradients of these rows alone, for `RowAdamW`."""
    base = unwrap(model)
    tables = [base.get_input_embeddings(), base.get_output_embeddings()] if wanted else []
    for table in tables:
        table.sparse = True
    try:
        yield
    finally:
        for table in tables:
            table.sparse = False


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scale all gradients together so that their norm is at most ``max_norm``; those of rows too."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    norm = nn.utils.get_total_norm(gradients)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def keep_full_rates(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """``optimizer`` with the learning rate of every group noted in it as ``full_lr``."""
    for group in optimizer.param_groups:
        group["full_lr"] = group["lr"]
    return optimizer


def set_rates(optimizer: Any, factor: float) -> None:
    """Every group's learning rate becomes its ``full_lr`` times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def make_optimizer(groups: Sequence[dict[str, Any]], learning_rate: float, course: Course) -> torch.optim.AdamW:
    """AdamW; a group may bring its own ``lr`` and ``weight_decay``."""
    optimizer = RowAdamW(
        list(groups),
        lr=learning_rate,
        betas=(0.9, course.beta2),
        eps=ADAM_EPSILON,
        weight_decay=course.weight_decay,
        fused=True,
    )
    return keep_full_rates(optimizer)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set every dropout of a model: the layers and the number inside each attention."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)


@contextmanager
def checkpointed(model: Any, wanted: bool) -> Iterator[None]:
    """Inside, layers of ``model`` keep their inputs alone where ``wanted``, and are computed again backwards."""
    if not wanted:
        yield
        return
    base = unwrap(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # a newer name is not there in all our versions
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.disable_input_require_grads()  # needed by the other kind of checkpoints alone
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            base.gradient_checkpointing_disable()


WINDOW, FAR_ABOVE, LONG_ABOVE = 20, 1.2, 10
"""Steps of a window, factor, windows. A training has diverged when the mean loss of a window is above the factor times
that of the first window, in so many windows in a row or at the end."""
EXPLODED = 30.0
"""A training that explodes within the first window spoils its own measure. If that window's mean is above so many times
the loss of the first step, the step is the measure. And at so many times the measure no full window is waited for."""
SMALL = 1.0
"""Least value of the measure: the loss of a student's pairs may start near 0 and rise a little before it falls."""


class LossGuard:
    """Ends a training whose loss is no number or stays above its start."""

    def __init__(self, first: float | None = None, advice: str = "Lower the learning rate") -> None:
        """``first``: the mean loss of the first window, or what is known of it before. ``advice``: of the error."""
        self.first, self.advice = first, advice
        self._is_own = False
        self._start: Tensor | None = None
        self._recent: deque[Tensor] = deque(maxlen=WINDOW)
        self._num_seen = self._num_above = 0

    def step(self, loss: Tensor, step: int, is_last: bool, learning_rate: float) -> None:
        """The loss of one step; it is read at the end of a window alone, which makes an accelerator wait.

        Raises:
            Diverged: the loss is no number, or far above its start for long or in the end.
        """
        self._start = loss if self._start is None else self._start
        self._recent.append(loss)
        self._num_seen += 1
        if self._num_seen % WINDOW and not is_last:
            return
        mean = float(torch.stack(list(self._recent)).float().mean())
        told = f"diverged at step {step}, learning_rate {learning_rate:g}: the loss is {mean:.4g}"
        if not math.isfinite(mean):
            raise Diverged(f"{told}, expected a number. {self.advice}")
        if self.first is None:
            start = float(self._start)
            self.first = start if mean > EXPLODED * start else mean
            self._is_own = True
        # a few steps say little, but where there are no others and their start is known
        is_whole = len(self._recent) == (WINDOW if self._is_own else min(WINDOW, step))
        far = mean > (FAR_ABOVE if is_whole else EXPLODED) * max(self.first, SMALL)
        if is_whole or far:
            self._num_above = self._num_above + 1 if far else 0
        if self._num_above and (is_last or self._num_above >= LONG_ABOVE):
            raise Diverged(f"{told}, it was {self.first:.4g} at first; expected less. {self.advice}")


def train_steps(
    optimizer: torch.optim.AdamW,
    batches: Iterable[TokenBatch],
    loss_fn: LossFn,
    precision: Precision,
    course: Course,
    device: torch.device,
    first_step: int,
    total_steps: int,
    on_step: OnStep | None = None,
    clip_each_group: bool = False,
    guard: LossGuard | None = None,
) -> tuple[int, float, int]:
    """One optimiser step per batch until the batches or ``total_steps`` end: (steps done, mean loss, samples).

    ``clip_each_group``: hold the gradient norm of every parameter group by itself below `CLIP_NORM`.
    Errors: `Diverged`, as of `LossGuard`.
    """
    guard = LossGuard() if guard is None else guard
    clipped = [group["params"] for group in optimizer.param_groups]
    if not clip_each_group:
        clipped = [[parameter for group in clipped for parameter in group]]
    loss_sum = torch.zeros((), device=device)
    step, samples, note = first_step, 0, ""
    for batch in batches:
        if step >= total_steps:
            break
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        set_rates(optimizer, learning_rate_factor(step, total_steps, course))
        with autocast(device, precision):
            loss = loss_fn(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameters in clipped:
            clip_gradients(parameters, CLIP_NORM)
        optimizer.step()
        loss_sum += loss.detach()
        step += 1
        samples += num_samples_of(batch)
        guard.step(loss.detach(), step, step == total_steps, optimizer.param_groups[0]["full_lr"])
        if step % NOTE_EVERY == 0 or step == total_steps:
            note = f"loss {float(loss_sum / (step - first_step)):.3f}"
        if on_step is not None:
            on_step(step, total_steps, note)
    done = step - first_step
    return done, float(loss_sum / max(1, done)), samples


def train_model(
    model: nn.Module,
    batches_of_epoch: Callable[[int], Iterable[TokenBatch]],
    total_steps: int,
    config: TrainConfig,
    course: Course,
    device: torch.device | str = "cpu",
    *,
    seed: int,
    table_lr_multiplier: float = 1.0,
    checkpointing: bool = False,
    parameters: Sequence[dict[str, Any]] | None = None,
    loss_fn: LossFn | None = None,
    on_step: OnStep | None = None,
    clip_each_group: bool = False,
    checkpoint: Checkpoint | None = None,
    validate: Validate | None = None,
) -> list[dict[str, Any]]:
    """Train ``model`` in place and return one log per epoch.

    ``batches_of_epoch(epoch)``: the batches of epoch 0, 1, ...
    ``table_lr_multiplier``: factor on the learning rate of the token embeddings. ``checkpointing``: as in
    `checkpointed`.
    ``parameters``: AdamW groups, default all trainable parameters. ``loss_fn(batch)``: default `sequence_loss`.
    ``clip_each_group``: as in `train_steps`.
    ``checkpoint``: where to keep how far it is, and to go on from; weights are those of a training that never stopped.
    ``validate``: what the model gains with each of the users of validation; asked before the first step and after
    every fifth of them, and the weights of the best step stay.
    A log holds epoch, step, loss, samples, samples_per_s, learning_rate; the last one "validation" too: the mean gain
    by step, "kept" and "num_users".
    Dropout draws from ``seed``; the global random state is left as it was. The model ends in evaluation mode.
    Errors: `Diverged` when the loss is not finite any more, or far above its start.
    """
    device = torch.device(device)
    if parameters is None:
        parameters = parameter_groups(model, config.learning_rate, course, table_lr_multiplier)
    optimizer = make_optimizer(parameters, config.learning_rate, course)
    if loss_fn is None:
        loss_fn = lambda batch: sequence_loss(model, batch)  # noqa: E731
    if course.dropout is not None:
        set_dropout(model, course.dropout)
    forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with forked, checkpointed(model, checkpointing):
        torch.manual_seed(seed)
        at, best = (Position(), None) if checkpoint is None else checkpoint.read(optimizer, device)
        best = _validated(validate, model, optimizer, at, best, total_steps)
        guard = LossGuard(at.first_loss)
        if at.step and on_step is not None:
            on_step(at.step, total_steps, "goes on")
        while at.step < total_steps:
            before = at.step
            model.train()
            started = time.perf_counter() - at.seconds
            left = islice(batches_of_epoch(at.epoch), at.batches, None)
            while (batches := _next(left, _piece(at.step, total_steps, validate is not None))) is not None:
                at.seconds = time.perf_counter() - started
                if checkpoint is not None:
                    checkpoint.write_if_due(at, optimizer, device, best)
                done, loss, samples = train_steps(
                    optimizer,
                    batches,
                    loss_fn,
                    config.precision,
                    course,
                    device,
                    at.step,
                    total_steps,
                    on_step,
                    clip_each_group,
                    guard,
                )
                at.first_loss = guard.first
                at.step, at.batches = at.step + done, at.batches + done
                at.loss, at.samples = at.loss + loss * done, at.samples + samples
                best = _validated(validate, model, optimizer, at, best, total_steps)
                if at.step >= total_steps:
                    break
            if at.step == before and at.batches == 0:
                raise ValueError(f"epoch {at.epoch} has no batches; expected training samples. Check the prepared data")
            log = {
                "epoch": at.epoch,
                "step": at.step,
                "loss": at.loss / at.batches,
                "samples": at.samples,
                "samples_per_s": at.samples / max(time.perf_counter() - started, 1e-9),
                "learning_rate": optimizer.param_groups[0]["lr"],
            }
            at.logs.append(log)
            at.loss, at.samples, at.seconds = 0.0, 0, 0.0
            at.epoch, at.batches = at.epoch + 1, 0
        if checkpoint is not None:
            checkpoint.write_if_due(at, optimizer, device, best)
    model.eval()
    if best is not None and at.logs:
        _keep(best, optimizer)
        at.logs[-1] |= {"validation": {"ndcg@10": at.scores, "kept": best.step, "num_users": len(best.gain_U)}}
    return at.logs


def _next(batches: Iterator[TokenBatch], size: int) -> Iterable[TokenBatch] | None:
    """The next ``size`` batches; None where there are none any more."""
    first = next(batches, None)
    return None if first is None else chain([first], islice(batches, size - 1))


# Validation: the weights of the best step stay.

Validate = Callable[[], Tensor]
"""(U,) float64: what the model gains with each user of validation."""
NUM_VALIDATIONS = 5
"""Beside the one before the first step."""


def validation_steps(total_steps: int) -> list[int]:
    """Those before the first step and after every fifth of all; the last one is ``total_steps``."""
    return sorted({round(total_steps * i / NUM_VALIDATIONS) for i in range(NUM_VALIDATIONS + 1)})


def _piece(step: int, total_steps: int, validates: bool) -> int:
    """Steps until the next reading of the loss, or of validation."""
    marks = validation_steps(total_steps) if validates else []
    return min([NOTE_EVERY, *(mark - step for mark in marks if mark > step)])


def _validated(
    validate: Validate | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: Position,
    best: Best | None,
    total_steps: int,
) -> Best | None:
    """The best step so far, with the one that the training is at.

    The last step stays unless an earlier one is ahead of it by more than one standard error of the paired difference:
    a decayed learning rate makes the end the best of most trainings, and few users cannot tell near steps apart.
    """
    if validate is None or str(at.step) in at.scores or at.step not in validation_steps(total_steps):
        return best
    with evaluating(model):
        gain_U = validate()
    at.scores[str(at.step)] = float(gain_U.mean())
    if best is not None:
        lead_U = best.gain_U - gain_U
        margin = lead_U.std() / math.sqrt(len(lead_U)) if at.step == total_steps else 0.0
        if lead_U.mean() > margin:
            return best
    copies = [one.detach().to("cpu", copy=True) for one in parameters_of(optimizer)]
    return Best(at.step, gain_U, copies)


def _keep(best: Best, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter, one in zip(parameters_of(optimizer), best.parameters, strict=True):
            parameter.copy_(one)
