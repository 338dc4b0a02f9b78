"""Elastic merging, compiled: FedEM's local epochs of adapter, user embedding and table, and the merge of whole tables.

The stacked code is in :mod:`embedding_fr.merging`, :mod:`embedding_fr.methods.fedem` and
:mod:`embedding_fr.methods.fedem_code`. Numba does not see that :mod:`embedding_fr.compiled.training` or
:mod:`embedding_fr.compiled.network` has changed: whoever changes them empties the caches.

Shape legend: C clients of a block, I items, R touched rows, D dims, F = 2 D features of an item, P numbers of an
adapter; within one client: S examples of a batch.
"""

from __future__ import annotations

import numpy as np

from embedding_fr.compiled.network import ITEMS, backward, climb, enter, gather
from embedding_fr.compiled.training import (
    GRADIENT,
    add_rows,
    compiled,
    dot_rows,
    outer,
    row_sums,
    step,
    take_batch,
    to_slopes,
)


@compiled
def weigh(adapter, sizes, hidden, rho_S, now):
    """rho of the features in ``hidden[0]``: sigmoid of the adapter's output."""
    one, out = rho_S.dtype.type(1.0), len(sizes) - 1
    nobody = np.empty(0, rho_S.dtype)
    enter(adapter, sizes, len(nobody), hidden[0, : sizes[0]], hidden[1], now)
    climb(adapter, sizes, nobody, hidden[1], hidden, now)
    for s in range(now):
        rho_S[s] = one / (one + np.exp(-hidden[out, 0, s]))


@compiled
def dot_step(schedule, steps, table_RD, flat_P, user_D, table_work, user_work, row, label, logit, slope_R, now):
    """One step of table and user under the score ``p . q_i`` -> the loss of the batch."""
    by_user = user_work[GRADIENT]
    logit[:now] = 0
    dot_rows(logit, table_RD, row, user_D, now)
    loss = to_slopes(logit, label, now)
    by_user[:] = 0
    add_rows(by_user, table_RD, row, logit, now)
    row_sums(slope_R, row, logit, now)
    outer(table_work[GRADIENT], slope_R, user_D)
    step(schedule, schedule.rate_T[0], steps, flat_P, table_work)
    step(schedule, schedule.rate_T[1], steps, user_D, user_work)
    return loss


@compiled
def train_merged(table_CRD, user_CD, adapter_CP, difference_CRD, feature_CRF, sizes, schedule):
    """In every epoch first the adapter's pass (equation 11), then that of user and table, under ``p . q_i``.

    The table comes without a merge, keeps what local steps add, and takes ``rho difference`` anew after every adapter
    pass. ``feature_CRF`` has one row where one rho serves all items. -> (C,) mean loss over the last epoch.
    """
    num_clients, num_touched, dims = table_CRD.shape
    number, out, alike = table_CRD.dtype.type, len(sizes) - 1, feature_CRF.shape[1] == 1
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    label, rho, all_rows = np.empty_like(logit), np.empty_like(logit), np.arange(num_touched)
    hidden = np.empty((len(sizes), sizes.max(), size), logit.dtype)
    slopes, nobody, no_rows = np.empty_like(hidden), np.empty(0, logit.dtype), np.empty((0, 0), logit.dtype)
    kept_score, effect = np.empty(num_touched, logit.dtype), np.empty(num_touched, logit.dtype)
    one, upstream = number(1.0), slopes[out, 0]
    for client in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[client]
        num_rows = schedule.place_CB[client, :count].max() + 1
        table, user, adapter = table_CRD[client, :num_rows], user_CD[client], adapter_CP[client]
        difference, feature = difference_CRD[client, :num_rows], feature_CRF[client]
        flat, slope = table.reshape(num_rows * dims), np.empty(num_rows, table.dtype)
        merge = np.zeros((num_rows, dims), table.dtype)
        table_work, user_work = np.zeros((3, len(flat)), table.dtype), np.zeros((3, dims), table.dtype)
        adapter_work = np.zeros((3, len(adapter)), table.dtype)
        by_adapter, num_batches = adapter_work[GRADIENT], -(-count // schedule.batch_size)
        num_epochs = schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            order = schedule.order_CEB[client, epoch]
            table -= merge
            kept_score[:num_rows] = 0
            effect[:num_rows] = 0
            dot_rows(kept_score, table, all_rows, user, num_rows)
            dot_rows(effect, difference, all_rows, user, num_rows)
            for batch in range(num_batches):
                now = take_batch(schedule, client, order, batch * schedule.batch_size, row, label)
                wide = 1 if alike else now
                if alike:
                    hidden[0, : sizes[0], 0] = feature[0]
                else:
                    gather(hidden[0], feature, row, now)
                weigh(adapter, sizes, hidden, rho, wide)
                for i in range(now):
                    logit[i] = kept_score[row[i]] + rho[0 if alike else i] * effect[row[i]]
                to_slopes(logit, label, now)
                upstream[:wide] = 0
                for i in range(now):
                    place = 0 if alike else i
                    upstream[place] += logit[i] * effect[row[i]] * rho[place] * (one - rho[place])
                by_adapter[:] = 0
                backward(adapter, sizes, nobody, hidden, slopes, by_adapter, nobody, no_rows, wide)
                step(schedule, schedule.rate_T[2], epoch * num_batches + batch + 1, adapter, adapter_work)
            for start in range(0, num_rows, size):
                now = min(size, num_rows - start)
                if alike:
                    hidden[0, : sizes[0], 0] = feature[0]
                else:
                    gather(hidden[0], feature, all_rows[start:], now)
                weigh(adapter, sizes, hidden, rho, 1 if alike else now)
                for i in range(now):
                    for d in range(dims):
                        merge[start + i, d] = rho[0 if alike else i] * difference[start + i, d]
            table += merge
            for batch in range(num_batches):
                now = take_batch(schedule, client, order, batch * schedule.batch_size, row, label)
                steps = epoch * num_batches + batch + 1
                loss = dot_step(
                    schedule, steps, table, flat, user, table_work, user_work, row, label, logit, slope, now
                )
                if epoch == num_epochs - 1:
                    loss_C[client] += loss
        loss_C[client] /= num_batches
    return loss_C


@compiled
def train_merging(table_CRD, user_CD, adapter_CP, sent_CRD, has_mix_C, sizes, schedule):
    """Score ``p . m_i`` with ``m_i = q_i + rho (sent_i - q_i)`` and rho from q as it is now; on every batch the adapter
    takes a step, then user and table. Without a mix ``m = q``. -> (C,) mean loss over the last epoch.
    """
    num_clients, _, dims = table_CRD.shape
    number, out = table_CRD.dtype.type, len(sizes) - 1
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    label, rho, effect = np.empty_like(logit), np.empty_like(logit), np.empty_like(logit)
    hidden = np.empty((len(sizes), sizes.max(), size), logit.dtype)
    slopes, nobody, no_rows = np.empty_like(hidden), np.empty(0, logit.dtype), np.empty((0, 0), logit.dtype)
    one, by_rows, upstream = number(1.0), slopes[0, : sizes[0]], slopes[out, 0]
    for client in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[client]
        num_rows = schedule.place_CB[client, :count].max() + 1
        table, user, adapter = table_CRD[client, :num_rows], user_CD[client], adapter_CP[client]
        flat, slope, sent = table.reshape(num_rows * dims), np.empty(num_rows, table.dtype), sent_CRD[client]
        table_work, user_work = np.zeros((3, len(flat)), table.dtype), np.zeros((3, dims), table.dtype)
        adapter_work = np.zeros((3, len(adapter)), table.dtype)
        by_table, by_user, by_adapter = table_work[GRADIENT], user_work[GRADIENT], adapter_work[GRADIENT]
        steps, num_epochs = 0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, client, schedule.order_CEB[client, epoch], begin, row, label)
                steps += 1
                if not has_mix_C[client]:
                    if schedule.weight_decay > 0.0:
                        step(schedule, schedule.rate_T[2], steps, adapter, adapter_work)
                    loss = dot_step(
                        schedule, steps, table, flat, user, table_work, user_work, row, label, logit, slope, now
                    )
                    if epoch == num_epochs - 1:
                        loss_C[client] += loss
                    continue
                for i in range(now):
                    for d in range(dims):
                        hidden[0, d, i] = sent[row[i], d] - table[row[i], d]
                        hidden[0, dims + d, i] = table[row[i], d]
                effect[:now] = 0
                for d in range(dims):
                    for i in range(now):
                        effect[i] += user[d] * hidden[0, d, i]
                for turn in range(2):
                    weigh(adapter, sizes, hidden, rho, now)
                    for i in range(now):
                        logit[i] = rho[i] * effect[i]
                    for d in range(dims):
                        for i in range(now):
                            logit[i] += user[d] * hidden[0, dims + d, i]
                    loss = to_slopes(logit, label, now)
                    for i in range(now):
                        upstream[i] = logit[i] * effect[i] * rho[i] * (one - rho[i])
                    if turn == 0:
                        if epoch == num_epochs - 1:
                            loss_C[client] += loss
                        by_adapter[:] = 0
                        backward(adapter, sizes, nobody, hidden, slopes, by_adapter, nobody, no_rows, now)
                        step(schedule, schedule.rate_T[2], steps, adapter, adapter_work)
                backward(adapter, sizes, nobody, hidden, slopes, nobody, nobody, by_rows, now)
                for d in range(dims):
                    total = number(0.0)
                    for i in range(now):
                        total += logit[i] * (hidden[0, dims + d, i] + rho[i] * hidden[0, d, i])
                    by_user[d] = total
                by_table[:] = 0
                for i in range(now):
                    own = logit[i] * (one - rho[i])
                    for d in range(dims):
                        by_table[row[i] * dims + d] += own * user[d] + by_rows[dims + d, i] - by_rows[d, i]
                step(schedule, schedule.rate_T[0], steps, flat, table_work)
                step(schedule, schedule.rate_T[1], steps, user, user_work)
        loss_C[client] /= -(-count // schedule.batch_size)
    return loss_C


@compiled
def merge_tables(last_CID, sent_XID, adapter_CP, sizes, merged_CID, first, stride):
    """``merged = last + rho (sent - last)`` with the clients' adapters; X is C, or 1 for a table that all of them got.
    -> (C,) the mean of rho, 0 for the clients of other threads.
    """
    num_clients, num_items, dims = last_CID.shape
    rho_C, rho = np.zeros(num_clients, last_CID.dtype), np.empty(ITEMS, last_CID.dtype)
    hidden = np.empty((len(sizes), sizes.max(), ITEMS), last_CID.dtype)
    for client in range(first, num_clients, stride):
        last, merged, total = last_CID[client], merged_CID[client], 0.0
        sent = sent_XID[min(client, len(sent_XID) - 1)]
        for start in range(0, num_items, ITEMS):
            now = min(ITEMS, num_items - start)
            for i in range(now):
                for d in range(dims):
                    hidden[0, d, i] = sent[start + i, d] - last[start + i, d]
                    hidden[0, dims + d, i] = last[start + i, d]
            weigh(adapter_CP[client], sizes, hidden, rho, now)
            for i in range(now):
                total += rho[i]
                for d in range(dims):
                    gap = sent[start + i, d] - last[start + i, d]
                    merged[start + i, d] = last[start + i, d] + rho[i] * gap
        rho_C[client] = total / num_items
    return rho_C
