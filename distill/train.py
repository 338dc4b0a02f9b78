"""Distillation: train a student of half depth and report what was lost and won back.

Shapes: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distill.config import DistillConfig
from distill.losses import finetune_loss, pair_losses
from distill.pairing import Pair, build_student, pair_parameters, pairs_of
from idgen.backbones.families import family_of
from idgen.backbones.family import TokenBatch, evaluating
from idgen.checkpoints import Checkpoint
from idgen.losses import sequence_loss
from idgen.optimizer import DISTILL_COURSE
from idgen.samples import num_batches, train_batches
from idgen.tasks import Task
from idgen.training import Execution, Optimisation, epoch_generator, set_dropout, train_model

Evaluate = Callable[[Any], dict[str, Any]]

REPORT_BATCHES = 8
"""Batches on which losses are measured before and after."""
KL_WEIGHT = 0.5
"""Of KL(teacher || student) beside the cross-entropy in fine-tuning."""


def distill(
    teacher: Any,
    tasks: Task | Sequence[Task],
    config: DistillConfig,
    execution: Execution,
    evaluate: Evaluate | None = None,
    checkpoints: Path | None = None,
    finetune_rate: float = 0.0,
) -> tuple[Any, dict[str, Any]]:
    """A student of half depth trained on the samples of ``tasks``, and a report; the teacher is left as it was.

    Every pair is trained on the teacher's inputs, all pairs in parallel: the pairs share no trained parameter, and
    gradients are clipped pair by pair. Embeddings, final norms and position biases stay the teacher's.
    The report holds ``pairs`` (loss of each before and after), ``chained_loss`` (cross-entropy of teacher, student at
    the start, student), ``parameters``, ``logs``; ``evaluate(model)`` adds its results for each model under "metrics".
    ``checkpoints``: a folder for those of both trainings (`idgen.training`).
    ``finetune_rate``: the learning rate of one further epoch of the whole student (`finetune`); 0 for none.
    Source: FeDecider (WWW 2026), appendix B.2. Differs from the paper: mean over tokens that count instead of a sum
    over all, see `pair_losses`; fine-tuning is an extension.
    """
    teacher.to(execution.device).eval()  # type: ignore[arg-type]
    student = build_student(teacher)
    pairs, batches = pairs_of(teacher), _report_batches(tasks, config, execution)

    def begun(name: str, seed: int) -> Execution:
        place = None if checkpoints is None else Checkpoint(checkpoints / f"{name}.safetensors")
        return execution._replace(seed=seed, checkpoint=place)

    stages = {"teacher": _measure(teacher, teacher, [], batches, evaluate)}
    stages["init"] = _measure(teacher, student, pairs, batches, evaluate)
    logs = {"pairs": train_pairs(teacher, student, tasks, config, begun("pairs", execution.seed))}
    stages["student"] = _measure(teacher, student, pairs, batches, evaluate)
    if finetune_rate > 0.0:
        tuned = replace(config, learning_rate=finetune_rate, epochs=1)
        # seed + 1: other batches than the pairs had.
        logs["finetune"] = finetune(teacher, student, tasks, tuned, begun("finetune", execution.seed + 1))
        stages["finetuned"] = _measure(teacher, student, pairs, batches, evaluate)
    report = {
        **_losses(pairs, stages),
        "parameters": {"teacher": _count(teacher), "student": _count(student)},
        "block_parameters": {"teacher": _count_layers(teacher), "student": _count_layers(student)},
        "logs": logs,
    }
    if evaluate is not None:
        report["metrics"] = {name: stage["metrics"] for name, stage in stages.items()}
    return student, report


def train_pairs(
    teacher: Any,
    student: Any,
    tasks: Task | Sequence[Task],
    config: DistillConfig,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Train every student block on its pair, in place; logs as in `train_model` (loss: sum over the pairs)."""
    teacher.eval()
    pairs = pairs_of(teacher)

    def loss(batch: TokenBatch) -> torch.Tensor:
        return pair_losses(teacher, student, pairs, batch).sum()

    groups = [pair_parameters(student, pair) for pair in pairs]
    return _train(student, groups, tasks, config, loss, execution, clip_each_group=True)


def finetune(
    teacher: Any,
    student: Any,
    tasks: Task | Sequence[Task],
    config: DistillConfig,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Extension: train all layers through the chained student, in place, see `finetune_loss`.

    Reason: each block was trained on inputs of the teacher, which it does not see in the chain.
    """
    teacher.eval()

    blocks = [
        Pair(stack, i, i, i) for stack, layers in family_of(student).layers(student).items() for i in range(len(layers))
    ]
    groups = [pair_parameters(student, block) for block in blocks]
    loss = partial(finetune_loss, teacher, student, kl_weight=KL_WEIGHT)
    return _train(student, groups, tasks, config, loss, execution, clip_each_group=False)


def _train(
    student: Any,
    trained: Sequence[Sequence[nn.Parameter]],
    tasks: Task | Sequence[Task],
    training: DistillConfig,
    loss: Callable[[TokenBatch], torch.Tensor],
    execution: Execution,
    clip_each_group: bool,
) -> list[dict[str, Any]]:
    """Train groups of parameters; everything else of the student is frozen meanwhile."""
    groups = [{"params": list(parameters)} for parameters in trained]
    student.requires_grad_(False)
    for group in groups:
        for parameter in group["params"]:
            parameter.requires_grad_(True)
    total_steps = training.epochs * num_batches(tasks, training.batch_size)
    logs = train_model(
        student,
        lambda epoch: train_batches(tasks, training.batch_size, epoch_generator(execution.seed, epoch)),
        loss,
        groups,
        Optimisation(training, DISTILL_COURSE, total_steps, clip_each_group),
        execution,
    )
    student.requires_grad_(True)
    set_dropout(student, family_of(student).dropout(student.config))
    return logs


def _report_batches(tasks: Task | Sequence[Task], config: DistillConfig, execution: Execution) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(execution.seed)
    batches = islice(train_batches(tasks, config.batch_size, generator), REPORT_BATCHES)
    return [{name: tensor.to(execution.device) for name, tensor in batch.items()} for batch in batches]


def _measure(
    teacher: Any, model: Any, pairs: Sequence[Pair], batches: Sequence[TokenBatch], evaluate: Evaluate | None
) -> dict[str, Any]:
    """Chained loss and pair losses of ``model`` on the batches, and whatever ``evaluate`` says."""
    with evaluating(model):
        chained = [float(sequence_loss(model, batch)) for batch in batches]
        by_batch = [pair_losses(teacher, model, pairs, batch) for batch in batches] if pairs else []
        return {
            "chained": sum(chained) / len(chained),
            "pairs": torch.stack(by_batch).mean(0).tolist() if pairs else [],
            "metrics": evaluate and evaluate(model),
        }


def _losses(pairs: Sequence[Pair], stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "stack": pair.stack,
                "student_block": pair.student,
                "teacher_blocks": list(range(pair.first, pair.last + 1)),
                "before": stages["init"]["pairs"][number],
                "after": stages["student"]["pairs"][number],
            }
            for number, pair in enumerate(pairs)
        ],
        "chained_loss": {stage: result["chained"] for stage, result in stages.items()},
    }


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _count_layers(model: Any) -> int:
    return sum(map(_count, family_of(model).layers(model).values()))
