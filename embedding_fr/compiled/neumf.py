"""NeuMF, compiled: sharpness-aware gradients on all examples of a client.

Logit ``w . (p * q_i) + tower([p', q'_i])``, where the tower's last layer is that of the output (He et al., 2017). All
clients share tables and network, and a logit depends on the item alone, so every row is gone through once, with the
weight of all its examples.

Numba does not see that :mod:`embedding_fr.compiled.training` or :mod:`embedding_fr.compiled.network` has changed:
whoever changes them empties the caches.

Shape legend: C clients of a block, I items, R touched rows, D dims, K features of user and item in the tower (4 D),
U units of the tower's first layer, P numbers of the tower; within one client: S rows at a time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from embedding_fr.compiled.network import ITEMS, TINY, backward, climb, enter, gather, square_norm
from embedding_fr.compiled.training import add_rows, compiled, dot_rows


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
