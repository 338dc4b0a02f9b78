"""Small networks, compiled: linear layers with ReLU between them, and local epochs of ``mlp([p, q_i])``.

A network is one vector: weight (in, out) in row-major order and bias (out,) of one layer after the other. Examples lie
side by side, (features, S), so that a layer of a few units still goes over long rows. What a client's user features
add to the first layer is the same for all its examples and enters the offset.

Numba does not see that :mod:`embedding_fr.compiled.training` has changed: whoever changes it empties the caches.

Logit ``w . (p * q_i) + tower([p', q'_i])``, where the tower's last layer is that of the output (He et al., 2017). All
clients share tables and network, and a logit depends on the item alone, so every row is gone through once, with the
weight of all its examples.

Numba does not see that :mod:`embedding_fr.compiled.training` or :mod:`embedding_fr.compiled.network` has changed:
whoever changes them empties the caches.

The stacked code is in :mod:`embedding_fr.merging`, :mod:`embedding_fr.methods.fedem` and
:mod:`embedding_fr.methods.fedem_code`. Numba does not see that :mod:`embedding_fr.compiled.training` or
:mod:`embedding_fr.compiled.network` has changed: whoever changes them empties the caches.

Shape legend: C clients of a block, R touched rows, D dims, P numbers of a flat parameter; within one client: S
examples of a batch, O outputs and I inputs of a layer, K features of the user, I items, K features of user and item in
the tower (4 D), U units of the tower's first layer, P numbers of the tower; within one client: S rows at a time, F = 2
D features of an item, P numbers of an adapter; within one client: S examples of a batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from embedding_fr.compiled.training import GRADIENT, add_rows, dot_rows, outer, row_sums, step, take_batch, to_slopes
from embedding_fr.compiled.training import compiled_training as compiled

# Small networks, compiled: linear layers with ReLU between them, and local epochs of ``mlp([p, q_i])``.

TINY = 1e-12
"""Keeps a perturbation defined where a gradient is zero, as :mod:`embedding_fr.methods.fedrecgel` does."""
ITEMS = 256
"""Rows of a whole table that go through a network at a time."""


@compiled
def add_products(out_OS, in_IS, weight, in_stride, out_stride, now):
    """``out[o] += sum_i w[i, o] in[i]``, where w is flat with these strides: four by four, which stay in registers.

    The strides are no literals anywhere: Numba would compile the function for each of them.
    """
    num_in, num_out, o = len(in_IS), len(out_OS), 0
    while o + 4 <= num_out:
        out0, out1, out2, out3, i = out_OS[o], out_OS[o + 1], out_OS[o + 2], out_OS[o + 3], 0
        at = o * out_stride
        while i + 4 <= num_in:
            a, b, c, d = at, at + out_stride, at + 2 * out_stride, at + 3 * out_stride
            a0, a1 = weight[a], weight[a + in_stride]
            a2, a3 = weight[a + 2 * in_stride], weight[a + 3 * in_stride]
            b0, b1 = weight[b], weight[b + in_stride]
            b2, b3 = weight[b + 2 * in_stride], weight[b + 3 * in_stride]
            c0, c1 = weight[c], weight[c + in_stride]
            c2, c3 = weight[c + 2 * in_stride], weight[c + 3 * in_stride]
            d0, d1 = weight[d], weight[d + in_stride]
            d2, d3 = weight[d + 2 * in_stride], weight[d + 3 * in_stride]
            in0, in1, in2, in3 = in_IS[i], in_IS[i + 1], in_IS[i + 2], in_IS[i + 3]
            for s in range(now):
                x0, x1, x2, x3 = in0[s], in1[s], in2[s], in3[s]
                out0[s] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                out1[s] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                out2[s] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                out3[s] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            i += 4
            at += 4 * in_stride
        while i < num_in:
            a0, b0 = weight[at], weight[at + out_stride]
            c0, d0 = weight[at + 2 * out_stride], weight[at + 3 * out_stride]
            in0 = in_IS[i]
            for s in range(now):
                x0 = in0[s]
                out0[s] += a0 * x0
                out1[s] += b0 * x0
                out2[s] += c0 * x0
                out3[s] += d0 * x0
            i += 1
            at += in_stride
        o += 4
    while o < num_out:
        out0, i, at = out_OS[o], 0, o * out_stride
        while i + 4 <= num_in:
            a0, a1 = weight[at], weight[at + in_stride]
            a2, a3 = weight[at + 2 * in_stride], weight[at + 3 * in_stride]
            in0, in1, in2, in3 = in_IS[i], in_IS[i + 1], in_IS[i + 2], in_IS[i + 3]
            for s in range(now):
                out0[s] += a0 * in0[s] + a1 * in1[s] + a2 * in2[s] + a3 * in3[s]
            i += 4
            at += 4 * in_stride
        while i < num_in:
            a0, in0 = weight[at], in_IS[i]
            for s in range(now):
                out0[s] += a0 * in0[s]
            i += 1
            at += in_stride
        o += 1


@compiled
def add_weight_gradient(gradient, in_IS, slope_OS, now):
    """``g[i, o] += sum_s in[i, s] slope[o, s]``, flat in row-major order: two by four.

    Eight sums and what they take fit the 16 vector registers of AVX2; four by four do not, and take 1.4 to 1.6 times as
    long there.
    """
    num_in, num_out, zero = len(in_IS), len(slope_OS), slope_OS.dtype.type(0.0)
    two_in, four_out = num_in - num_in % 2, num_out - num_out % 4
    for i in range(0, two_in, 2):
        in0, in1 = in_IS[i], in_IS[i + 1]
        for o in range(0, four_out, 4):
            slope0, slope1, slope2, slope3 = slope_OS[o], slope_OS[o + 1], slope_OS[o + 2], slope_OS[o + 3]
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            for s in range(now):
                x0, x1 = in0[s], in1[s]
                y0, y1, y2, y3 = slope0[s], slope1[s], slope2[s], slope3[s]
                a0, a1, a2, a3 = a0 + x0 * y0, a1 + x0 * y1, a2 + x0 * y2, a3 + x0 * y3
                b0, b1, b2, b3 = b0 + x1 * y0, b1 + x1 * y1, b2 + x1 * y2, b3 + x1 * y3
            add_four(gradient, i * num_out + o, a0, a1, a2, a3)
            add_four(gradient, (i + 1) * num_out + o, b0, b1, b2, b3)
        for o in range(four_out, num_out):
            slope0, a0, b0 = slope_OS[o], zero, zero
            for s in range(now):
                a0, b0 = a0 + in0[s] * slope0[s], b0 + in1[s] * slope0[s]
            gradient[i * num_out + o] += a0
            gradient[(i + 1) * num_out + o] += b0
    for i in range(two_in, num_in):
        in0 = in_IS[i]
        for o in range(num_out):
            slope0, a0 = slope_OS[o], zero
            for s in range(now):
                a0 += in0[s] * slope0[s]
            gradient[i * num_out + o] += a0


@compiled
def add_four(gradient, at, a, b, c, d):
    """Four neighbours at once."""
    gradient[at] += a
    gradient[at + 1] += b
    gradient[at + 2] += c
    gradient[at + 3] += d


@compiled
def enter(network, sizes, num_common, rows_IS, product_OS, now):
    """What the rows' features add to the outputs of the first layer."""
    out_OS = product_OS[: sizes[1]]
    out_OS[:, :now] = 0
    add_products(out_OS, rows_IS, network[num_common * sizes[1] :], sizes[1], np.int64(1), now)


@compiled
def climb(network, sizes, user_K, product_OS, hidden, now):
    """From the products of :func:`enter` the outputs of layer l in ``hidden[l + 1]``."""
    num_layers, num_out = len(sizes) - 1, sizes[1]
    zero = product_OS.dtype.type(0.0)
    offset_O = network[sizes[0] * num_out : (sizes[0] + 1) * num_out].copy()
    for k in range(len(user_K)):
        for o in range(num_out):
            offset_O[o] += user_K[k] * network[k * num_out + o]
    for o in range(num_out):
        offset, out = offset_O[o], hidden[1, o]
        if num_layers > 1:
            for s in range(now):
                out[s] = max(product_OS[o, s] + offset, zero)
        else:
            for s in range(now):
                out[s] = product_OS[o, s] + offset
    at = (sizes[0] + 1) * num_out
    for layer in range(1, num_layers):
        num_in, num_out = sizes[layer], sizes[layer + 1]
        out_OS = hidden[layer + 1, :num_out]
        for o in range(num_out):
            out_OS[o, :now] = network[at + num_in * num_out + o]
        add_products(out_OS, hidden[layer, :num_in], network[at:], num_out, np.int64(1), now)
        if layer < num_layers - 1:
            for o in range(num_out):
                for s in range(now):
                    out_OS[o, s] = max(out_OS[o, s], zero)
        at += (num_in + 1) * num_out


@compiled
def backward(network, sizes, user_K, hidden, slopes, by_network, by_user, by_rows_IS, now):
    """Adds the gradients by network and by the user, and writes those by the rows; an empty array is not wanted.
    ``slopes[l + 1]`` holds the derivatives by the output of layer l, of which those of the last one are given.
    """
    at, weighs, zero = len(network), len(by_network) > 0, network.dtype.type(0.0)
    by_offset = np.empty(sizes.max(), network.dtype)
    for layer in range(len(sizes) - 2, -1, -1):
        num_in, num_out, common = sizes[layer], sizes[layer + 1], len(user_K) if layer == 0 else 0
        at -= (num_in + 1) * num_out
        slope, below = slopes[layer + 1, :num_out], slopes[layer, :num_in] if layer > 0 else by_rows_IS
        if weighs or common:
            for o in range(num_out):
                total, one = zero, slope[o]
                for s in range(now):
                    total += one[s]
                by_offset[o] = total
        for k in range(common):
            total = zero
            for o in range(num_out):
                total += network[at + k * num_out + o] * by_offset[o]
            by_user[k] += total
        rows_at = at + common * num_out
        if weighs:
            for k in range(common):
                for o in range(num_out):
                    by_network[at + k * num_out + o] += user_K[k] * by_offset[o]
            for o in range(num_out):
                by_network[at + num_in * num_out + o] += by_offset[o]
            add_weight_gradient(by_network[rows_at:], hidden[layer, : num_in - common], slope, now)
        below[:, :now] = 0
        add_products(below, slope, network[rows_at:], np.int64(1), num_out, now)
        if layer > 0:
            for j in range(num_in):
                out, kept = hidden[layer, j], below[j]
                for s in range(now):
                    kept[s] = kept[s] if out[s] > zero else zero


@compiled
def climb_catalogue(network, sizes, user_CK, product_UI, output_COI, first, stride):
    """Outputs of one network for all clients and items; ``product_UI`` is what items add to its first layer."""
    num_items, num_out, top = product_UI.shape[1], output_COI.shape[1], len(sizes) - 1
    hidden = np.empty((len(sizes), sizes.max(), ITEMS), product_UI.dtype)
    for start in range(0, num_items, ITEMS):
        now = min(ITEMS, num_items - start)
        product_UX = product_UI[:, start : start + now].copy()
        for client in range(first, len(user_CK), stride):
            climb(network, sizes, user_CK[client], product_UX, hidden, now)
            for o in range(num_out):
                output_COI[client, o, start : start + now] = hidden[top, o, :now]


@compiled
def gather(rows_DS, table_RD, row_S, now):
    """The table's rows of a batch side by side, four at a time."""
    dims, i = table_RD.shape[1], 0
    while i + 4 <= now:
        row0, row1, row2, row3 = (
            table_RD[row_S[i]],
            table_RD[row_S[i + 1]],
            table_RD[row_S[i + 2]],
            table_RD[row_S[i + 3]],
        )
        for d in range(dims):
            rows_DS[d, i], rows_DS[d, i + 1] = row0[d], row1[d]
            rows_DS[d, i + 2], rows_DS[d, i + 3] = row2[d], row3[d]
        i += 4
    while i < now:
        for d in range(dims):
            rows_DS[d, i] = table_RD[row_S[i], d]
        i += 1


@compiled
def add_to_rows(total_P, value_DS, row_S, dims, now):
    """Adds column i to row ``row[i]`` of a flat table."""
    for i in range(now):
        for d in range(dims):
            total_P[row_S[i] * dims + d] += value_DS[d, i]


@compiled
def square_norm(value_P):
    """``sum_i v_i^2``."""
    total = value_P.dtype.type(0.0)
    for i in range(len(value_P)):
        total += value_P[i] * value_P[i]
    return total


@compiled
def train_mlp(table_CRD, user_CD, network_CP, sizes, goal_CRD, pull, private_radius, shared_radius, schedule):
    """Score ``mlp([p, q_i])`` of the widths ``sizes``; everything steps together. -> (C,) mean loss of the last epoch.

    Every row's gradient has ``pull (q_i - goal_i)`` added; without rows ``goal_CRD`` says that there is no such term.
    With a radius above 0 the gradient of p (private), or that of table and network (shared), is the one at the point
    ``x + radius g / ||g||`` of its own side (:func:`~embedding_fr.methods.fedrecgel.sharpness_aware`);
    p moves no product of the
    rows, so that its pass begins behind them. A pull and a radius exclude each other.
    """
    num_clients, _, dims = table_CRD.shape
    number, top = table_CRD.dtype.type, len(sizes) - 1
    loss_C = np.zeros(num_clients, table_CRD.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, label = np.empty(size, np.int64), np.empty(size, table_CRD.dtype)
    hidden = np.empty((len(sizes), sizes.max(), size), table_CRD.dtype)
    slopes, product = np.empty_like(hidden), np.empty((sizes[1], size), table_CRD.dtype)
    logit, by_rows = slopes[top, 0], slopes[0, :dims]
    nothing, no_rows = np.empty(0, table_CRD.dtype), np.empty((0, 0), table_CRD.dtype)
    moved_user, sharp_user = np.empty(dims, table_CRD.dtype), np.empty(dims, table_CRD.dtype)
    moved_network = np.empty(network_CP.shape[1], table_CRD.dtype)
    for client in range(schedule.first, num_clients, schedule.stride):
        count = schedule.count_C[client]
        num_rows = schedule.place_CB[client, :count].max() + 1
        table, user, network = table_CRD[client, :num_rows], user_CD[client], network_CP[client]
        flat = table.reshape(num_rows * dims)
        table_work, user_work = np.zeros((3, len(flat)), table.dtype), np.zeros((3, dims), table.dtype)
        network_work = np.zeros((3, len(network)), table.dtype)
        by_table, by_user, by_network = table_work[GRADIENT], user_work[GRADIENT], network_work[GRADIENT]
        pulled, strength = goal_CRD.shape[1] > 0, number(pull)
        goal = goal_CRD[client, :num_rows].reshape(num_rows * dims) if pulled else flat
        steps, num_epochs = 0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, client, schedule.order_CEB[client, epoch], begin, row, label)
                steps += 1
                gather(hidden[0], table, row, now)
                enter(network, sizes, dims, hidden[0, :dims], product, now)
                climb(network, sizes, user, product, hidden, now)
                logit[:now] = hidden[top, 0, :now]
                loss = to_slopes(logit, label, now)
                if epoch == num_epochs - 1:
                    loss_C[client] += loss
                by_network[:] = 0
                by_user[:] = 0
                by_table[:] = 0
                backward(network, sizes, user, hidden, slopes, by_network, by_user, by_rows, now)
                if pulled:
                    for i in range(len(flat)):
                        by_table[i] = strength * (flat[i] - goal[i])
                add_to_rows(by_table, by_rows, row, dims, now)
                if private_radius > 0.0:
                    scale = number(private_radius / (np.sqrt(square_norm(by_user)) + TINY))
                    for d in range(dims):
                        moved_user[d] = user[d] + scale * by_user[d]
                    climb(network, sizes, moved_user, product, hidden, now)
                    logit[:now] = hidden[top, 0, :now]
                    to_slopes(logit, label, now)
                    sharp_user[:] = 0
                    backward(network, sizes, moved_user, hidden, slopes, nothing, sharp_user, no_rows, now)
                else:
                    sharp_user[:] = by_user
                if shared_radius > 0.0:
                    square = square_norm(by_network) + square_norm(by_table)
                    scale = number(shared_radius / (np.sqrt(square) + TINY))
                    for i in range(len(network)):
                        moved_network[i] = network[i] + scale * by_network[i]
                    for i in range(now):
                        for d in range(dims):
                            hidden[0, d, i] = table[row[i], d] + scale * by_table[row[i] * dims + d]
                    enter(moved_network, sizes, dims, hidden[0, :dims], product, now)
                    climb(moved_network, sizes, user, product, hidden, now)
                    logit[:now] = hidden[top, 0, :now]
                    to_slopes(logit, label, now)
                    by_network[:] = 0
                    by_table[:] = 0
                    backward(moved_network, sizes, user, hidden, slopes, by_network, by_user, by_rows, now)
                    add_to_rows(by_table, by_rows, row, dims, now)
                by_user[:] = sharp_user
                step(schedule, schedule.rate_T[0], steps, flat, table_work)
                step(schedule, schedule.rate_T[1], steps, user, user_work)
                step(schedule, schedule.rate_T[2], steps, network, network_work)
        loss_C[client] /= -(-count // schedule.batch_size)
    return loss_C


# NeuMF, compiled: sharpness-aware gradients on all examples of a client.


class Neumf(NamedTuple):
    """What all clients share."""

    item_ID: np.ndarray
    wide_IK: np.ndarray
    """q' of each item."""
    product_IU: np.ndarray
    """What q' adds to the tower's first layer."""
    network_P: np.ndarray
    mix_D: np.ndarray
    """w."""
    sizes: np.ndarray


class Side(NamedTuple):
    """A tensor of every client for each part of one side: parameters, or gradients by them."""

    user_CD: np.ndarray
    wide_CK: np.ndarray


class Shared(NamedTuple):
    """Gradients by what is shared; those of the tables by row."""

    item_CRD: np.ndarray
    wide_CRK: np.ndarray
    network_CP: np.ndarray
    mix_CD: np.ndarray


class Rows(NamedTuple):
    """The examples of a block by row."""

    row_CR: np.ndarray
    count_C: np.ndarray
    weight_CR: np.ndarray
    """Sum of the weights of a row's examples."""
    positive_CR: np.ndarray
    """The positive ones' part of it."""


@compiled
def slopes_of_rows(logit_S, weight_S, positive_S, now):
    """Logits z become the derivatives of the loss by them, ``w sigmoid(z) - w+``, in place -> ``w softplus(z) - w+ z``,
    summed."""
    one, zero, total = logit_S.dtype.type(1.0), logit_S.dtype.type(0.0), 0.0
    for i in range(now):
        z = logit_S[i]
        small = np.exp(-abs(z))
        total += weight_S[i] * (max(z, zero) + math.log1p(small)) - positive_S[i] * z
        logit_S[i] = weight_S[i] * ((one if z >= zero else small) / (one + small)) - positive_S[i]
    return total


@compiled
def spread(table_RK, rows_KS, now):
    """Columns become rows, four at a time."""
    i = 0
    while i + 4 <= now:
        row0, row1, row2, row3 = table_RK[i], table_RK[i + 1], table_RK[i + 2], table_RK[i + 3]
        for k in range(len(rows_KS)):
            row0[k], row1[k], row2[k], row3[k] = rows_KS[k, i], rows_KS[k, i + 1], rows_KS[k, i + 2], rows_KS[k, i + 3]
        i += 4
    while i < now:
        for k in range(len(rows_KS)):
            table_RK[i, k] = rows_KS[k, i]
        i += 1


@compiled
def sharp_gradients(model, rows, private, private_radius, shared_radius, by_private, by_shared, first, stride):
    """Gradients of the weighted cross-entropy, each side's at ``x + radius g / ||g||`` of its own plain gradient g, the
    other side unmoved; a radius of 0 leaves the plain one. ``by_private`` and ``by_shared`` are zero before. -> (C,)
    loss at the plain point.
    """
    num_clients, dims, wide, sizes = len(rows.row_CR), len(model.mix_D), private.wide_CK.shape[1], model.sizes
    number, top, first_units = model.mix_D.dtype.type, len(sizes) - 1, sizes[1]
    loss_C = np.zeros(num_clients, model.mix_D.dtype)
    hidden = np.empty((len(sizes), sizes.max(), ITEMS), model.mix_D.dtype)
    slopes, item = np.empty_like(hidden), np.empty((ITEMS, dims), model.mix_D.dtype)
    product, in_order = np.empty((first_units, ITEMS), model.mix_D.dtype), np.arange(max(ITEMS, rows.row_CR.shape[1]))
    nothing, no_rows = np.empty(0, model.mix_D.dtype), np.empty((0, 0), model.mix_D.dtype)
    logit, by_rows, mixed = slopes[top, 0], slopes[0, :wide], np.empty(dims, model.mix_D.dtype)
    seen, mix, user = np.empty(dims, mixed.dtype), np.empty(dims, mixed.dtype), np.empty(dims, mixed.dtype)
    wide_user, by_wide_user = np.empty(wide, mixed.dtype), np.empty(wide, mixed.dtype)
    network, by_network = np.empty_like(model.network_P), np.empty_like(model.network_P)
    for client in range(first, num_clients, stride):
        count, row = rows.count_C[client], rows.row_CR[client]
        weight, positive = rows.weight_CR[client], rows.positive_CR[client]
        by_item, by_wide = by_shared.item_CRD[client, :count], by_shared.wide_CRK[client, :count]
        plain_user, sharp_wide = by_private.user_CD[client], by_private.wide_CK[client]
        for turn in range(3):  # plain, private side moved, shared side moved
            user[:], wide_user[:] = private.user_CD[client], private.wide_CK[client]
            mix[:], network[:] = model.mix_D, model.network_P
            moved = number(0.0)
            if turn == 1:
                if private_radius == 0.0:
                    continue
                square = square_norm(plain_user) + square_norm(sharp_wide)
                scale = number(private_radius / (np.sqrt(square) + TINY))
                user += scale * plain_user
                wide_user += scale * sharp_wide
            if turn == 2:
                if shared_radius == 0.0:
                    continue
                square = square_norm(by_item.ravel()) + square_norm(by_wide.ravel())
                square += square_norm(by_shared.network_CP[client]) + square_norm(by_shared.mix_CD[client])
                moved = number(shared_radius / (np.sqrt(square) + TINY))
                network += moved * by_shared.network_CP[client]
                mix += moved * by_shared.mix_CD[client]
            mixed[:] = mix * user
            seen[:] = 0
            by_wide_user[:] = 0
            by_network[:] = 0
            for start in range(0, count, ITEMS):
                now = min(ITEMS, count - start)
                for i in range(now):
                    r = row[start + i]
                    for d in range(dims):
                        item[i, d] = model.item_ID[r, d] + moved * by_item[start + i, d]
                if turn == 0:
                    gather(hidden[0], model.wide_IK, row[start:], now)
                if turn == 2:
                    for i in range(now):
                        r = row[start + i]
                        for k in range(wide):
                            by_wide[start + i, k] = model.wide_IK[r, k] + moved * by_wide[start + i, k]
                    gather(hidden[0], by_wide, in_order[start:], now)
                    enter(network, sizes, wide, hidden[0, :wide], product, now)
                else:
                    gather(product, model.product_IU, row[start:], now)
                climb(network, sizes, wide_user, product, hidden, now)
                logit[:now] = hidden[top, 0, :now]
                dot_rows(logit, item, in_order, mixed, now)
                loss = slopes_of_rows(logit, weight[start:], positive[start:], now)
                if turn == 0:
                    loss_C[client] += loss
                add_rows(seen, item, in_order, logit, now)
                if turn == 1:
                    backward(network, sizes, wide_user, hidden, slopes, nothing, by_wide_user, no_rows, now)
                else:
                    backward(network, sizes, wide_user, hidden, slopes, by_network, by_wide_user, by_rows, now)
                    for i in range(now):
                        for d in range(dims):
                            by_item[start + i, d] = logit[i] * mixed[d]
                    spread(by_wide[start:], by_rows, now)
            if turn < 2:
                plain_user[:] = mix * seen
                sharp_wide[:] = by_wide_user
            if turn != 1:
                by_shared.mix_CD[client] = user * seen
                by_shared.network_CP[client] = by_network
    return loss_C


# Elastic merging, compiled: FedEM's local epochs of adapter, user embedding and table, and the merge of whole
# tables.


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
