"""The compiled loop of core.truncated. Imports numba, so it is itself imported where it is first needed."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.core.compiled import compiled
from foretoken.core.vectors import LANES, softmax_row

BINS = 64  # of scores, for every factor e of probability


def _kth(row, k):  # type: ignore[no-untyped-def]
    """The k-th largest number of row [v], 0 < k < v, equal ones counted each."""
    heap = np.sort(row[:k])  # its least number comes first, and none before both numbers below it
    least = heap[0]
    for j in range(k, len(row)):
        if row[j] > least:
            at, below = 0, 1
            while below < k:
                if below + 1 < k and heap[below + 1] < heap[below]:
                    below += 1
                if heap[below] >= row[j]:
                    break
                heap[at] = heap[below]
                at, below = below, 2 * below + 1
            heap[at] = row[j]
            least = heap[0]
    return least


kth = compiled(_kth)


def _nucleus(row, p, top_p):  # type: ignore[no-untyped-def]
    """The least score of row [v] that is kept, and the first index at which that very score is kept.

    p [v]: softmax of the row. A token is kept if the mass above it is below top_p, where of equal scores the later
    index stands above. Tokens of probability (1 - top_p) / v and less have no more than 1 - top_p together, so that
    none of them is kept; the others are counted in bins of scores, and only the bin in which the mass reaches top_p
    is sorted.
    """
    v, count, cut = len(row), 0, np.float32(0.99 * (1 - top_p) / len(row))  # less than rounding moves a probability
    places = np.empty(v, np.int32)
    for j in range(v):
        if p[j] > cut:
            places[count] = j
            count += 1
    places = places[:count]
    scores = row[places]
    largest, smallest = np.max(scores), np.min(scores)
    bins = np.empty(count, np.int32)
    mass = np.zeros(int((largest - smallest) * np.float32(BINS)) + 1)
    for i in range(count):
        bins[i] = int((largest - scores[i]) * np.float32(BINS))
        mass[bins[i]] += float(p[places[i]])
    above, b = 0.0, 0
    while b < len(mass) and above + mass[b] < top_p:
        above += mass[b]
        b += 1
    if b == len(mass):  # by rounding
        return smallest, 0
    inside = places[bins == b]
    order = np.argsort(row[inside], kind="mergesort")  # stable: of equal scores the later index comes last
    least = inside[order[-1]]
    for i in range(len(order) - 1, -1, -1):
        if above >= top_p:
            break
        least = inside[order[i]]
        above += float(p[least])
    return row[least], least


nucleus = compiled(_nucleus)


def _drop(row, kept, least):  # type: ignore[no-untyped-def]
    """The scores of row [v] become -inf where kept [v] is below `least`."""
    for j in range(len(row)):
        row[j] = -np.inf if kept[j] < least else row[j]


drop = compiled(_drop)


def _truncate(row, v, p, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """The scores row [:v] that are not kept become -inf; False where no p is finite.

    row, p: of a multiple of LANES; row is -inf from v on, p is scratch. top_k: 0 for all; top_p, min_p: 1 and 0.
    """
    chunks, scores = len(row) // LANES, row[:v]
    if 0 < top_k < v:
        drop(scores, scores, kth(scores, top_k))
    if top_p < 1:
        if not np.isfinite(softmax_row(row, 0, np.float32(1), p, 0, chunks)):
            return False
        least, first = nucleus(scores, p[:v], top_p)
        drop(scores, scores, least)
        for j in range(first):
            if row[j] == least:
                row[j] = -np.inf
    if min_p > 0:
        total = softmax_row(row, 0, np.float32(1), p, 0, chunks)  # the largest of the numbers summed is 1
        if not np.isfinite(total):
            return False
        drop(scores, p[:v], np.float32(min_p) * np.float32(1 / total))
    return True


truncate = compiled(_truncate)


def truncated_softmax_loop(scores, temperature, top_k, top_p, min_p, out):  # type: ignore[no-untyped-def]
    """out [m, v] = softmax of the truncated scores / temperature [m, v]; False where a row has NaN, +inf or nothing
    finite."""
    m, v = scores.shape
    chunks = (v + LANES - 1) // LANES
    row, p = np.full(chunks * LANES, -np.inf, np.float32), np.empty(chunks * LANES, np.float32)
    for i in range(m):
        for j in range(v):
            row[j] = scores[i, j] / temperature
        if not truncate(row, v, p, top_k, top_p, min_p):
            return False
        if not np.isfinite(softmax_row(row, 0, np.float32(1), p, 0, chunks)):
            return False
        out[i] = p[:v]
    return True
