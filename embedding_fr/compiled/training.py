"""A client's local epochs, compiled: gradients in closed form, Adam or SGD, batch after batch.

Shape legend: C clients of a block, R touched rows, D dims, K columns of a low-rank factor, E epochs; within one client:
S examples of a batch, P numbers of a flat parameter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedecider.federation import compiled_rows as compiling

compiled_training = compiling.compiled(
    fastmath={"contract", "reassoc", "nsz", "arcp"}  # sums in any order; NaN and infinity stay what they are
)

GRADIENT, MEAN, SQUARE = 0, 1, 2
"""Rows of the work space of a parameter: its gradient and the moments of Adam."""


class Schedule(NamedTuple):
    """What the clients of a block go through. ``train_*`` functions step the tensors that they take, in their order."""

    place_CB: np.ndarray
    """int64 row of each example in its client's table."""
    num_positive_C: np.ndarray
    count_C: np.ndarray
    order_CEB: np.ndarray
    """int64 order of the examples in each epoch."""
    batch_size: int
    group_GT: np.ndarray
    """bool: which tensors step together; every batch goes through all groups."""
    rate_T: np.ndarray
    """float64 learning rate of each tensor."""
    weight_decay: float
    adam: bool
    """Adam with fresh moments; else plain SGD."""
    first: int
    stride: int
    """Clients first, first + stride, ... are trained: the share of one thread."""


@compiled_training
def take_batch(schedule, client, order_B, begin, row_S, label_S):
    """Rows and labels of the batch that begins at ``begin`` -> how many they are."""
    now = min(schedule.batch_size, schedule.count_C[client] - begin)
    for i in range(now):
        example = order_B[begin + i]
        row_S[i] = schedule.place_CB[client, example]
        label_S[i] = example < schedule.num_positive_C[client]
    return now


@compiled_training
def step(schedule, rate, steps, param_P, work_3P):
    """One step of a tensor, in place; ``steps`` counts from 1 (Adam: Kingma and Ba, 2015)."""
    number = param_P.dtype.type
    gradient, mean, square = work_3P[GRADIENT], work_3P[MEAN], work_3P[SQUARE]
    decay = number(schedule.weight_decay)
    if not schedule.adam:
        for i in range(len(param_P)):
            param_P[i] -= number(rate) * (gradient[i] + decay * param_P[i])
        return
    scale, unbiased = number(rate / (1.0 - 0.9**steps)), number(1.0 / math.sqrt(1.0 - 0.999**steps))
    old_1, new_1, old_2, new_2, eps = number(0.9), number(0.1), number(0.999), number(0.001), number(1e-8)
    for i in range(len(param_P)):
        slope = gradient[i] + decay * param_P[i]
        first = old_1 * mean[i] + new_1 * slope
        second = old_2 * square[i] + new_2 * slope * slope
        mean[i], square[i] = first, second
        param_P[i] -= scale * first / (np.sqrt(second) * unbiased + eps)


@compiled_training
def to_slopes(logit_S, label_S, now):
    """Logits z become the derivatives of the mean cross-entropy by them, ``(sigmoid(z) - y) / S``, in place.
    -> the mean cross-entropy, ``softplus(z) - y z``.
    """
    one, zero = logit_S.dtype.type(1.0), logit_S.dtype.type(0.0)
    share, total, product = one / logit_S.dtype.type(now), 0.0, 1.0
    for i in range(now):
        z = logit_S[i]
        small = np.exp(-abs(z))
        total += max(z, zero) - label_S[i] * z
        product *= 1.0 + small  # one logarithm of many factors of at most 2
        if product > 1e300:
            total, product = total + math.log(product), 1.0
        logit_S[i] = ((one if z >= zero else small) / (one + small) - label_S[i]) * share
    return (total + math.log(product)) / now


@compiled_training
def row_sums(slope_R, row_S, slope_S, now):
    """The slope of each row: the sum over its examples."""
    slope_R[:] = 0
    for i in range(now):
        slope_R[row_S[i]] += slope_S[i]


@compiled_training
def dot_rows(logit_S, table_RD, row_S, vector_D, now):
    """``z_i += q_r . v`` for the row r of each example, two at a time."""
    dims, zero = table_RD.shape[1], logit_S.dtype.type(0.0)
    for i in range(0, now - 1, 2):
        r, s, first, second = row_S[i], row_S[i + 1], zero, zero
        for d in range(dims):
            first += table_RD[r, d] * vector_D[d]
            second += table_RD[s, d] * vector_D[d]
        logit_S[i] += first
        logit_S[i + 1] += second
    if now % 2:
        for d in range(dims):
            logit_S[now - 1] += table_RD[row_S[now - 1], d] * vector_D[d]


@compiled_training
def add_rows(total_D, table_RD, row_S, weight_S, now):
    """``t += sum_i w_i q_r`` over the row r of each example, four at a time."""
    dims, i = table_RD.shape[1], 0
    while i + 4 <= now:
        r0, r1, r2, r3 = row_S[i], row_S[i + 1], row_S[i + 2], row_S[i + 3]
        w0, w1, w2, w3 = weight_S[i], weight_S[i + 1], weight_S[i + 2], weight_S[i + 3]
        for d in range(dims):
            total_D[d] += (w0 * table_RD[r0, d] + w1 * table_RD[r1, d]) + (w2 * table_RD[r2, d] + w3 * table_RD[r3, d])
        i += 4
    while i < now:
        for d in range(dims):
            total_D[d] += weight_S[i] * table_RD[row_S[i], d]
        i += 1


@compiled_training
def outer(gradient_P, slope_R, vector_D):
    """``g_r v`` for each row r, one after the other."""
    dims = len(vector_D)
    for r in range(len(slope_R)):
        for d in range(dims):
            gradient_P[r * dims + d] = slope_R[r] * vector_D[d]


@compiled_training
def train_linear(table_CRD, scorer_CP, schedule):
    """Score ``q_i . w``, or with P = D + 1 numbers ``q_i . w + b``. -> (C,) mean loss over the last epoch."""
    num_clients, _, dims = table_CRD.shape
    number, biased = table_CRD.dtype.type, scorer_CP.shape[1] > dims
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    label = np.empty_like(logit)
    for client in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[client]
        num_rows = schedule.place_CB[client, :count].max() + 1
        table, scorer = table_CRD[client, :num_rows], scorer_CP[client]
        flat, slope = table.reshape(num_rows * dims), np.empty(num_rows, table.dtype)
        table_work, scorer_work = np.zeros((3, len(flat)), table.dtype), np.zeros((3, len(scorer)), table.dtype)
        steps, num_epochs = 0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, client, schedule.order_CEB[client, epoch], begin, row, label)
                steps += 1
                for group in range(len(schedule.group_GT)):
                    steps_table, steps_scorer = schedule.group_GT[group]
                    logit[:now] = scorer[dims] if biased else number(0.0)
                    dot_rows(logit, table, row, scorer, now)
                    loss = to_slopes(logit, label, now)
                    if group == 0 and epoch == num_epochs - 1:
                        loss_C[client] += loss
                    if steps_scorer:
                        gradient = scorer_work[GRADIENT]
                        gradient[:] = 0
                        add_rows(gradient[:dims], table, row, logit, now)
                        if biased:
                            gradient[dims] = logit[:now].sum()
                    if steps_table:
                        row_sums(slope, row, logit, now)
                        outer(table_work[GRADIENT], slope, scorer[:dims])
                        step(schedule, schedule.rate_T[0], steps, flat, table_work)
                    if steps_scorer:
                        step(schedule, schedule.rate_T[1], steps, scorer, scorer_work)
        loss_C[client] /= -(-count // schedule.batch_size)
    return loss_C


@compiled_training
def train_low_rank(table_CRD, left_CRK, user_CD, right_CP, schedule):
    """Score ``p . (q_i + B^T a_i)``; p, the rows a_i of ``left`` and B (K, D) in ``right`` step, the table is frozen.
    -> (C,) mean loss over the last epoch.
    """
    num_clients, _, dims = table_CRD.shape
    rank, number = left_CRK.shape[2], table_CRD.dtype.type
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    label, seen, weighted = np.empty_like(logit), np.empty(rank, logit.dtype), np.empty(rank, logit.dtype)
    for client in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[client]
        num_rows = schedule.place_CB[client, :count].max() + 1
        table, left, user, right = table_CRD[client], left_CRK[client, :num_rows], user_CD[client], right_CP[client]
        flat, slope = left.reshape(num_rows * rank), np.empty(num_rows, table.dtype)
        left_work, user_work = np.zeros((3, len(flat)), table.dtype), np.zeros((3, dims), table.dtype)
        right_work = np.zeros((3, len(right)), table.dtype)
        by_user, by_right = user_work[GRADIENT], right_work[GRADIENT]
        steps, num_epochs = 0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, client, schedule.order_CEB[client, epoch], begin, row, label)
                steps += 1
                for k in range(rank):
                    seen[k] = (right[k * dims : (k + 1) * dims] * user).sum()
                logit[:now] = number(0.0)
                dot_rows(logit, table, row, user, now)
                dot_rows(logit, left, row, seen, now)
                loss = to_slopes(logit, label, now)
                if epoch == num_epochs - 1:
                    loss_C[client] += loss
                by_user[:] = 0
                weighted[:] = 0
                add_rows(by_user, table, row, logit, now)
                add_rows(weighted, left, row, logit, now)
                outer(by_right, weighted, user)
                for k in range(rank):
                    for d in range(dims):
                        by_user[d] += weighted[k] * right[k * dims + d]
                row_sums(slope, row, logit, now)
                outer(left_work[GRADIENT], slope, seen)
                step(schedule, schedule.rate_T[1], steps, flat, left_work)
                step(schedule, schedule.rate_T[2], steps, user, user_work)
                step(schedule, schedule.rate_T[3], steps, right, right_work)
        loss_C[client] /= -(-count // schedule.batch_size)
    return loss_C
