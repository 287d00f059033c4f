"""Balancing as in the papers, one sample at a time, in float64.

``rows`` are ``(n, d)`` gradients in the order visited. A tie is negative, as by
grab-sampler's rule.
"""

from __future__ import annotations

import numpy as np


def mean(order, rows, centre):
    """Returns the next order of mean balance around ``centre``."""
    return batch(order, rows, centre, [(i, i + 1) for i in range(len(order))])


def pair(order, rows, num_workers: int = 1):
    """Returns the next order of (coordinated) pair balance; 2W must divide n."""
    lefts = [[] for _ in range(num_workers)]
    rights = [[] for _ in range(num_workers)]
    total = np.zeros(rows.shape[1])
    for block in range(0, len(order), 2 * num_workers):
        for worker in range(num_workers):
            i, j = block + worker, block + num_workers + worker
            z = rows[i] - rows[j]
            plus = total @ z < 0
            total = total + z if plus else total - z
            first, second = (order[i], order[j]) if plus else (order[j], order[i])
            lefts[worker].append(first)
            rights[worker].insert(0, second)
    following = [left + right for left, right in zip(lefts, rights)]
    return [following[i % num_workers][i // num_workers] for i in range(len(order))]


def recursive(order, rows, centre, depth: int):
    """Returns the next order of recursive balance: samples walk from root to leaf."""
    totals = [np.zeros(rows.shape[1]) for _ in range(2 ** (depth + 1) - 1)]
    leaves = [([], []) for _ in range(2**depth)]
    for i, sample in enumerate(order):
        z, node = rows[i] - centre, 0
        for level in range(depth + 1):
            plus = totals[node] @ z < 0
            totals[node] = totals[node] + z if plus else totals[node] - z
            leaf, node = node - (2**level - 1), 2 * node + (1 if plus else 2)
        if plus:
            leaves[leaf][0].append(sample)
        else:
            leaves[leaf][1].insert(0, sample)
    return [sample for front, back in leaves for sample in front + back]


def recursive_pair(order, rows, size: int):
    """Returns the next order of recursive pair balance; ``size`` must divide n."""
    totals = [np.zeros(rows.shape[1]) for _ in range(size - 1)]

    def sort(items, node, before):
        if len(items) == 1:
            return items
        left, right = [], []
        for x, y in zip(items[0::2], items[1::2]):
            plus = before[node] @ (rows[x] - rows[y]) < 0
            left.append(x if plus else y)
            right.append(y if plus else x)
        totals[node] = totals[node] + rows[left].sum(0) - rows[right].sum(0)
        return sort(left, 2 * node + 1, before) + sort(right, 2 * node + 2, before)

    blocks = [
        sort(list(range(first, first + size)), 0, list(totals))
        for first in range(0, len(order), size)
    ]
    columns = enumerate(zip(*blocks))
    return [order[i] for n, column in columns for i in column[:: -1 if n % 2 else 1]]


def batch(order, rows, centre, steps, centred_update: bool = True):
    """Returns the next order of batch balance; ``steps`` are (start, end) pairs."""
    left, right, total = [], [], np.zeros(rows.shape[1])
    for start, end in steps:
        plus = [total @ (rows[i] - centre) < 0 for i in range(start, end)]
        for i, is_plus in zip(range(start, end), plus):
            z = rows[i] - centre if centred_update else rows[i]
            total = total + z if is_plus else total - z
            if is_plus:
                left.append(order[i])
            else:
                right.insert(0, order[i])
    return left + right


def followed(total, vectors, signs):
    """Returns the sum that signs lead to, and which of them are not nearly ties.

    Asserts that those are the signs of the balance.
    """
    totals = np.vstack([total, total + (signs[:, None] * vectors).cumsum(0)])
    products = (totals[:-1] * vectors).sum(1)
    sure = np.abs(products) > 1e-9 * (vectors**2).sum(1)
    assert (signs == np.where(products < 0, 1, -1))[sure].all()
    return totals[-1], sure
