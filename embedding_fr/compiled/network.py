"""Small networks, compiled: linear layers with ReLU between them, and local epochs of ``mlp([p, q_i])``.

A network is one vector: weight (in, out) in row-major order and bias (out,) of one layer after the other. Examples lie
side by side, (features, S), so that a layer of a few units still goes over long rows. What a client's user features
add to the first layer is the same for all its examples and enters the offset.

Numba does not see that :mod:`embedding_fr.compiled.training` has changed: whoever changes it empties the caches.

Shape legend: C clients of a block, R touched rows, D dims, P numbers of a flat parameter; within one client: S examples
of a batch, O outputs and I inputs of a layer, K features of the user.
"""

from __future__ import annotations

import numpy as np

from embedding_fr.compiled.training import GRADIENT, compiled, step, take_batch, to_slopes

TINY = 1e-12
"""Keeps a perturbation defined where a gradient is zero, as :mod:`embedding_fr.sharpness` does."""
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
    ``x + radius g / ||g||`` of its own side (:func:`embedding_fr.sharpness.sharpness_aware`); p moves no product of the
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
