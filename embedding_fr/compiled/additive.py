"""FedRAP's local epochs, compiled: whole tables are gone over once a round, not once a step.

A step changes the rows of its batch by what their examples say, and every other row by the regularisers alone. Without
examples the rows follow a recurrence that no other row, no example and no user embedding enters. With eta the rate of
C, zeta that of D, W the weight decay and ``G = D - C``, one step is

    C <- S(C - 2 eta lambda h G - eta (m + W) C),    D <- D + 2 zeta lambda h G - zeta W D,

with S the soft-threshold at eta mu for l1 (else the identity), m = 2 mu for l2 (else 0), and ``h = 1`` for the
Frobenius distance or ``1 / (1 + ||G_j||^2)^2`` in row j for the bounded one. So k steps of a row can wait until its
next example, or the end of the round, and are taken there, one after the other while the row lies in the nearest cache;
without a threshold and with h = 1 they are the k-th power of a matrix of two rows. The public code regularises the rows
of a batch only: for all others ``lambda = mu = 0``, and k steps multiply a table by the product of ``1 - eta_s W``, 1
without weight decay. A bound on the norm of C's gradient joins all rows in every step: there is no such recurrence,
and the stacked code is taken.

Numba does not see that :mod:`embedding_fr.compiled.training` has changed: whoever changes it empties the caches.

Shape legend: C clients of a block, I items, D dims, P = D or, with a bias, D + 1; within one client: S examples of a
batch, F numbers of neighbouring rows, K results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedding_fr.compiled.training import add_rows, dot_rows, take_batch, to_slopes
from embedding_fr.compiled.training import compiled_training as compiled

CHUNK = 512
"""Numbers of a table that take all their steps before the next ones do."""


class Regularisers(NamedTuple):
    """What a round fixes beside learning rates and weight decay."""

    push: float
    """2 lambda(a)."""
    pull: float
    """Slope of the penalty on the common table: 2 mu(a) for l2, mu(a) for the public code's l1, else 0."""
    by_sign: bool
    """Whether ``pull`` is times the sign of an entry, not times the entry."""
    threshold: float
    """eta mu(a) of the paper's l1, else 0."""
    bounded: bool
    means: bool
    """The public code: means over examples and dims, and regularisers on the rows of a batch only."""
    step_decay: float
    """All learning rates shrink by this with every step of a client."""
    largest: float
    """Entries beyond this have diverged."""
    high: float
    low: float
    """Entries of the common table above these are counted."""


@compiled
def drift(first_F, second_F, dims, since, until, rule, rate, second_rate, weight_decay):
    """The steps ``since`` to ``until`` of rows without examples, in place; ``second_F`` may be empty."""
    number, both = first_F.dtype.type, len(second_F) > 0
    if rule.means:
        keep, second_keep = 1.0, 1.0
        for steps in range(since, until):
            shrunk = rule.step_decay**steps * weight_decay
            keep *= 1.0 - rate * shrunk
            second_keep *= 1.0 - second_rate * shrunk
        if weight_decay > 0.0:
            kept, second_kept = number(keep), number(second_keep)
            for i in range(len(first_F)):
                first_F[i] *= kept
            for i in range(len(second_F)):
                second_F[i] *= second_kept
        return
    across, down = rate * rule.push, rate * (rule.pull + weight_decay)
    second_across, back = second_rate * rule.push, second_rate * weight_decay
    if rule.threshold == 0.0 and not (rule.bounded and both):
        cc, cd, dc, dd = 1.0, 0.0, 0.0, 1.0
        for _ in range(until - since):
            cc, cd, dc, dd = (
                (1.0 + across - down) * cc - across * dc,
                (1.0 + across - down) * cd - across * dd,
                (1.0 + second_across - back) * dc - second_across * cc,
                (1.0 + second_across - back) * dd - second_across * cd,
            )
        ff, fs, sf, ss = number(cc), number(cd), number(dc), number(dd)
        if not both:
            for i in range(len(first_F)):
                first_F[i] *= ff
            return
        for i in range(len(first_F)):
            c, d = first_F[i], second_F[i]
            first_F[i], second_F[i] = ff * c + fs * d, sf * c + ss * d
        return
    a, b, theta = number(across), number(down), number(rule.threshold)
    e, w = number(second_across), number(back)
    for _ in range(until - since):
        if not both:
            for i in range(len(first_F)):
                c = first_F[i] - b * first_F[i]
                first_F[i] = c - min(max(c, -theta), theta)
        elif not rule.bounded:
            for i in range(len(first_F)):
                c, d = first_F[i], second_F[i]
                gap = d - c
                c -= a * gap + b * c
                first_F[i], second_F[i] = c - min(max(c, -theta), theta), d + (e * gap - w * d)
        else:
            for start in range(0, len(first_F), dims):
                square = number(0.0)
                for i in range(start, start + dims):
                    square += (second_F[i] - first_F[i]) * (second_F[i] - first_F[i])
                share = (number(1.0) + square) * (number(1.0) + square)
                near, second_near = a / share, e / share
                for i in range(start, start + dims):
                    c, d = first_F[i], second_F[i]
                    gap = d - c
                    c -= near * gap + b * c
                    first_F[i], second_F[i] = c - min(max(c, -theta), theta), d + (second_near * gap - w * d)


@compiled
def step_row(first_D, second_D, user_D, slope, share, rule, rate, second_rate, weight_decay):
    """One step of a row with examples, in place; ``share`` is that of the row where regularisers are means, else 1."""
    number, both, dims = first_D.dtype.type, len(second_D) > 0, len(first_D)
    eta, zeta, decay, theta = number(rate), number(second_rate), number(weight_decay), number(rule.threshold)
    push, pull = number(rule.push * share), number(rule.pull * share)
    if both and rule.bounded:
        square = number(0.0)
        for d in range(dims):
            square += (second_D[d] - first_D[d]) * (second_D[d] - first_D[d])
        push /= (number(1.0) + square) * (number(1.0) + square)
    for d in range(dims):
        common, fit = first_D[d], slope * user_D[d]
        gap = push * (second_D[d] - common) if both else number(0.0)
        penalty = pull * (np.sign(common) if rule.by_sign else common)
        moved = common - eta * (fit + gap + penalty + decay * common)
        first_D[d] = moved - min(max(moved, -theta), theta)
        if both:
            second_D[d] -= zeta * (fit - gap + decay * second_D[d])


@compiled
def measure(table_F, rule):
    """How many entries are beyond ``rule.largest`` or NaN, above ``rule.high``, above ``rule.low`` in size."""
    number = table_F.dtype.type
    largest, high, low = number(rule.largest), number(rule.high), number(rule.low)
    fine, above_high, above_low = 0, 0, 0
    for i in range(len(table_F)):
        size = abs(table_F[i])
        fine += size <= largest
        above_high += size > high
        above_low += size > low
    return len(table_F) - fine, above_high, above_low


@compiled
def train_additive(first_CID, second_CID, user_CP, rule, schedule):
    """Score ``u . (C_j + D_j)``, or with P = D + 1 numbers plus a bias; SGD. With one table only it is the first, and
    the second has no rows; ``schedule.place_CB`` holds item numbers.

    -> (C, 4) mean loss over the last epoch, entries that diverged, shares of the first table above the two limits.
    """
    num_clients, num_items, dims = first_CID.shape
    both, biased, number = second_CID.shape[1] > 0, user_CP.shape[1] > dims, first_CID.dtype.type
    found_CK = np.zeros((num_clients, 4), first_CID.dtype)
    size = min(schedule.batch_size, schedule.place_CB.shape[1])
    row, logit = np.empty(size, np.int64), np.empty(size, first_CID.dtype)
    label, slope = np.empty_like(logit), np.empty(num_items, logit.dtype)
    times, done = np.empty(num_items, np.int64), np.empty(num_items, np.int64)
    by_user, weight_decay = np.empty(user_CP.shape[1], logit.dtype), schedule.weight_decay
    first_rate, second_rate, user_rate = schedule.rate_T[0], schedule.rate_T[1], schedule.rate_T[2]
    for client in range(schedule.first, num_clients, schedule.stride):
        count, first, second, user = schedule.count_C[client], first_CID[client], second_CID[client], user_CP[client]
        done[:] = 0
        steps, shrunk, num_epochs = 0, 1.0, schedule.order_CEB.shape[1]
        for epoch in range(num_epochs):
            for begin in range(0, count, schedule.batch_size):
                now = take_batch(schedule, client, schedule.order_CEB[client, epoch], begin, row, label)
                for i in range(now):
                    r = row[i]
                    if done[r] < steps:
                        other = second[r] if both else second.ravel()
                        drift(first[r], other, dims, done[r], steps, rule, first_rate, second_rate, weight_decay)
                    done[r], slope[r], times[r] = steps, 0, 0
                logit[:now] = user[dims] if biased else number(0.0)
                dot_rows(logit, first, row, user, now)
                if both:
                    dot_rows(logit, second, row, user, now)
                loss = to_slopes(logit, label, now)
                if epoch == num_epochs - 1:
                    found_CK[client, 0] += loss
                for i in range(now):
                    if not rule.means:
                        logit[i] *= now
                    slope[row[i]] += logit[i]
                    times[row[i]] += 1
                by_user[:] = 0
                add_rows(by_user[:dims], first, row, logit, now)
                if both:
                    add_rows(by_user[:dims], second, row, logit, now)
                if biased:
                    by_user[dims] = logit[:now].sum()
                rate, other_rate = first_rate * shrunk, second_rate * shrunk
                for i in range(now):
                    r = row[i]
                    if done[r] == steps:
                        share = times[r] / (now * dims) if rule.means else 1.0
                        other = second[r] if both else second.ravel()
                        step_row(first[r], other, user, slope[r], share, rule, rate, other_rate, weight_decay)
                        done[r] = steps + 1
                rate = user_rate * shrunk
                for d in range(len(user)):
                    user[d] -= number(rate) * (by_user[d] + number(weight_decay) * user[d])
                steps += 1
                shrunk *= rule.step_decay
        start, most = 0, max(1, CHUNK // dims)
        while start < num_items:  # the neighbours that have waited equally long
            end = start + 1
            while end < num_items and end < start + most and done[end] == done[start]:
                end += 1
            if done[start] < steps:
                other = second[start:end].ravel() if both else second.ravel()
                rows = first[start:end].ravel()
                drift(rows, other, dims, done[start], steps, rule, first_rate, second_rate, weight_decay)
            start = end
        found_CK[client, 0] /= -(-count // schedule.batch_size)
        beyond, above_high, above_low = measure(first.ravel(), rule)
        found_CK[client, 1] = beyond + measure(second.ravel(), rule)[0]
        found_CK[client, 2], found_CK[client, 3] = above_high / first.size, above_low / first.size
    return found_CK
