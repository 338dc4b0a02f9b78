"""Elastic merging of FedEM's public code, compiled: local epochs of adapter, user embedding and item table together.

The stacked form is :mod:`embedding_fr.methods.fedem_code`. An adapter is one vector: weight (in, out) in row-major
order and bias (out,) of one linear layer after the other, with ReLU between them. Examples lie side by side, (features,
S), so that a layer of a few units still goes over long rows.

Numba does not see that :mod:`embedding_fr.compiled.training` has changed: whoever changes it empties the caches.

Shape legend: C clients of a block, R touched rows, D dims, P numbers of an adapter; within one client: S examples of a
batch, L layers, W the widest of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedding_fr.compiled.training import GRADIENT, add_rows, dot_rows, outer, row_sums, step, take_batch, to_slopes
from embedding_fr.compiled.training import compiled_training as compiled


class Client(NamedTuple):
    """What one client trains, and its work space."""

    table_RD: np.ndarray
    sent_RD: np.ndarray
    user_D: np.ndarray
    adapter_P: np.ndarray
    table_work: np.ndarray
    user_work: np.ndarray
    adapter_work: np.ndarray
    slope_R: np.ndarray


class Batch(NamedTuple):
    """Room for what the examples of a batch need."""

    row_S: np.ndarray
    label_S: np.ndarray
    logit_S: np.ndarray
    rho_S: np.ndarray
    effect_S: np.ndarray
    """``p . (sent_i - q_i)``."""
    hidden_LWS: np.ndarray
    """Inputs of the adapter's layers, and its output at the end."""
    slope_LWS: np.ndarray
    """Derivatives of the loss by them."""


@compiled
def forward(adapter_P, sizes, batch, now):
    """rho of the features in ``hidden[0]``: sigmoid of the adapter's output; ``hidden`` keeps every layer."""
    hidden, at, last = batch.hidden_LWS, 0, len(sizes) - 1
    one, zero = adapter_P.dtype.type(1.0), adapter_P.dtype.type(0.0)
    for layer in range(last):
        num_in, num_out = sizes[layer], sizes[layer + 1]
        for o in range(num_out):
            out_S = hidden[layer + 1, o]
            out_S[:now] = adapter_P[at + num_in * num_out + o]
            for i in range(num_in):
                weight, in_S = adapter_P[at + i * num_out + o], hidden[layer, i]
                for s in range(now):
                    out_S[s] += weight * in_S[s]
            if layer + 1 < last:
                for s in range(now):
                    out_S[s] = max(out_S[s], zero)
        at += (num_in + 1) * num_out
    for s in range(now):
        batch.rho_S[s] = one / (one + np.exp(-hidden[last, 0, s]))


@compiled
def backward(adapter_P, sizes, batch, gradient_P, now):
    """From the derivatives by the output those by every layer, down to the features, and those by the adapter; an empty
    ``gradient_P`` is not wanted."""
    hidden, slopes, at, zero = batch.hidden_LWS, batch.slope_LWS, len(adapter_P), adapter_P.dtype.type(0.0)
    for layer in range(len(sizes) - 2, -1, -1):
        num_in, num_out = sizes[layer], sizes[layer + 1]
        at -= (num_in + 1) * num_out
        slopes[layer, :num_in, :now] = 0
        for o in range(num_out):
            slope_S = slopes[layer + 1, o]
            if len(gradient_P):
                total = zero
                for s in range(now):
                    total += slope_S[s]
                gradient_P[at + num_in * num_out + o] = total
                for i in range(num_in):
                    total, in_S = zero, hidden[layer, i]
                    for s in range(now):
                        total += in_S[s] * slope_S[s]
                    gradient_P[at + i * num_out + o] = total
            for i in range(num_in):
                weight, below_S = adapter_P[at + i * num_out + o], slopes[layer, i]
                for s in range(now):
                    below_S[s] += weight * slope_S[s]
        if layer > 0:
            for i in range(num_in):
                for s in range(now):
                    if hidden[layer, i, s] <= zero:
                        slopes[layer, i, s] = zero


@compiled
def plain_step(client, batch, schedule, steps, now):
    """One step of table and user under the score ``p . q_i`` -> the loss of the batch."""
    by_user, logit = client.user_work[GRADIENT], batch.logit_S
    logit[:now] = 0
    dot_rows(logit, client.table_RD, batch.row_S, client.user_D, now)
    loss = to_slopes(logit, batch.label_S, now)
    by_user[:] = 0
    add_rows(by_user, client.table_RD, batch.row_S, logit, now)
    row_sums(client.slope_R, batch.row_S, logit, now)
    outer(client.table_work[GRADIENT], client.slope_R, client.user_D)
    step(schedule, schedule.rate_T[0], steps, client.table_RD.reshape(client.table_RD.size), client.table_work)
    step(schedule, schedule.rate_T[1], steps, client.user_D, client.user_work)
    return loss


@compiled
def merged_slopes(client, batch, sizes, now):
    """Derivatives of the loss by logits and adapter's output, under ``p . (q_i + rho (sent_i - q_i))`` -> the loss."""
    user, logit, rho, effect = client.user_D, batch.logit_S, batch.rho_S, batch.effect_S
    dims, one = len(user), user.dtype.type(1.0)
    forward(client.adapter_P, sizes, batch, now)
    for i in range(now):
        logit[i] = rho[i] * effect[i]
    for d in range(dims):
        for i in range(now):
            logit[i] += user[d] * batch.hidden_LWS[0, dims + d, i]
    loss = to_slopes(logit, batch.label_S, now)
    upstream = batch.slope_LWS[len(sizes) - 1, 0]
    for i in range(now):
        upstream[i] = logit[i] * effect[i] * rho[i] * (one - rho[i])
    return loss


@compiled
def merging_step(client, batch, sizes, schedule, steps, now):
    """A step of the adapter, then one of user and table under the merged score -> the loss before both."""
    table, user, row, feature = client.table_RD, client.user_D, batch.row_S, batch.hidden_LWS[0]
    dims, one, zero = len(user), user.dtype.type(1.0), user.dtype.type(0.0)
    for i in range(now):
        for d in range(dims):
            feature[d, i] = client.sent_RD[row[i], d] - table[row[i], d]
            feature[dims + d, i] = table[row[i], d]
    batch.effect_S[:now] = 0
    for d in range(dims):
        for i in range(now):
            batch.effect_S[i] += user[d] * feature[d, i]
    loss = merged_slopes(client, batch, sizes, now)
    backward(client.adapter_P, sizes, batch, client.adapter_work[GRADIENT], now)
    step(schedule, schedule.rate_T[2], steps, client.adapter_P, client.adapter_work)
    merged_slopes(client, batch, sizes, now)
    backward(client.adapter_P, sizes, batch, client.adapter_P[:0], now)
    logit, rho, by_feature = batch.logit_S, batch.rho_S, batch.slope_LWS[0]
    for d in range(dims):
        total = zero
        for i in range(now):
            total += logit[i] * (feature[dims + d, i] + rho[i] * feature[d, i])
        client.user_work[GRADIENT, d] = total
    by_table = client.table_work[GRADIENT]
    by_table[:] = 0
    for i in range(now):
        own = logit[i] * (one - rho[i])
        for d in range(dims):
            by_table[row[i] * dims + d] += own * user[d] + by_feature[dims + d, i] - by_feature[d, i]
    step(schedule, schedule.rate_T[0], steps, table.reshape(table.size), client.table_work)
    step(schedule, schedule.rate_T[1], steps, user, client.user_work)
    return loss


@compiled
def train_merging(table_CRD, user_CD, adapter_CP, sent_CRD, has_mix_C, sizes, schedule):
    """Score ``p . m_i`` with ``m_i = q_i + rho (sent_i - q_i)`` and rho from q as it is now; on every batch the adapter
    takes a step, then user and table. Without a mix ``m = q``. -> (C,) mean loss over the last epoch.
    """
    num_clients, _, dims = table_CRD.shape
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    hidden = np.empty((len(sizes), sizes.max(), size), logit.dtype)
    batch = Batch(
        row, np.empty_like(logit), logit, np.empty_like(logit), np.empty_like(logit), hidden, np.empty_like(hidden)
    )
    for number in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[number]
        num_rows = schedule.place_CB[number, :count].max() + 1
        client = Client(
            table_CRD[number, :num_rows],
            sent_CRD[number],
            user_CD[number],
            adapter_CP[number],
            np.zeros((3, num_rows * dims), logit.dtype),
            np.zeros((3, dims), logit.dtype),
            np.zeros((3, adapter_CP.shape[1]), logit.dtype),
            np.empty(num_rows, logit.dtype),
        )
        steps, num_epochs = 0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, number, schedule.order_CEB[number, epoch], begin, row, batch.label_S)
                steps += 1
                if has_mix_C[number]:
                    loss = merging_step(client, batch, sizes, schedule, steps, now)
                else:
                    if schedule.weight_decay > 0.0:
                        step(schedule, schedule.rate_T[2], steps, client.adapter_P, client.adapter_work)
                    loss = plain_step(client, batch, schedule, steps, now)
                if epoch == num_epochs - 1:
                    loss_C[number] += loss
        loss_C[number] /= -(-count // schedule.batch_size)
    return loss_C
