"""The softmax of rows, over all tokens or over the more likely ones alone: top-k, top-p and min-p."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.kernel.addresses import alive, floats
from foretoken.kernel.compile import compiled, linked
from foretoken.kernel.simd import LANES, softmax_row

BINS = 64  # bins of scores for each difference of 1, and at most MOST_BINS in all
MOST_BINS = 1 << 16


@compiled
def before(scores, sign, a, b):
    """Whether index a has a lower score than index b or, of equal ones, is lower; scores, sign: as in `sink`."""
    difference = sign * (scores[a] - scores[b])
    return difference < 0 or (difference == 0 and sign * (a - b) < 0)


@compiled
def sink(heap, size, scores, sign, at):
    """Move an entry of a heap down to where it belongs. (`np.sort` would take two seconds to compile.)

    heap: indices into scores; entry i is `before` entries 2 i + 1 and 2 i + 2 [size or more].
    size: number of entries.
    scores: float32 [v].
    sign: 1 for a heap that begins with the lowest score, -1 with the highest.
    at: number of the entry, in front of which all are in order.
    """
    moved, below = heap[at], 2 * at + 1
    while below < size:
        if below + 1 < size and before(scores, sign, heap[below + 1], heap[below]):
            below += 1
        if not before(scores, sign, heap[below], moved):
            break
        heap[at] = heap[below]
        at, below = below, 2 * below + 1
    heap[at] = moved


@compiled
def heaped(size, scores, sign):
    """Return a heap of the indices below `size`, int64 [size]; scores, sign: as in `sink`."""
    heap = np.empty(size, np.int64)
    for i in range(size):
        heap[i] = i
    for at in range(size // 2 - 1, -1, -1):
        sink(heap, size, scores, sign, at)
    return heap


@compiled
def kth(row, k):
    """Return the k-th largest number of a row [v], where equal numbers count each and 0 < k < v."""
    heap = heaped(k, row, 1)  # of the k largest so far
    least = row[heap[0]]
    for j in range(k, len(row)):
        if row[j] > least:
            heap[0] = j
            sink(heap, k, row, 1, 0)
            least = row[heap[0]]
    return least


@compiled
def nucleus(scores, p, places, mass):
    """Keep the tokens of top-p: those above which there is less probability than `mass`.

    Tokens are ordered by score; of equal scores the later one is above. They are counted in bins of scores, and only
    the bin in which the mass is reached is put in order.

    scores: float32 [v].
    p: the tokens' probabilities up to a factor, a softmax of a multiple of the scores, float32 [v].
    places: the tokens to choose among, in ascending order; those that are kept are moved to the front [c].
    mass: the sum that the kept tokens reach, in units of p.

    Returns the number of tokens that are kept.
    """
    largest = smallest = scores[places[0]]
    for place in places:
        if scores[place] > largest:
            largest = scores[place]
        if scores[place] < smallest:
            smallest = scores[place]
    spread = np.float64(largest) - np.float64(smallest)
    fine = BINS if spread * BINS < MOST_BINS else MOST_BINS / spread
    bins = np.empty(len(places), np.int32)
    masses = np.zeros(int(spread * fine) + 1)
    for i in range(len(places)):
        bins[i] = int((np.float64(largest) - np.float64(scores[places[i]])) * fine)
        masses[bins[i]] += np.float64(p[places[i]])
    above, b = 0.0, 0
    while b < len(masses) and above + masses[b] < mass:
        above += masses[b]
        b += 1
    inside, chosen, count = np.empty(len(places), np.int64), np.empty(len(places), np.float32), 0
    for i in range(len(places)):
        if bins[i] == b:
            inside[count], chosen[count] = i, scores[places[i]]
            count += 1
    heap = heaped(count, chosen, -1)
    while count > 0 and above < mass:
        bins[inside[heap[0]]] = -1
        above += np.float64(p[places[inside[heap[0]]]])
        count -= 1
        heap[0] = heap[count]
        sink(heap, count, chosen, -1, 0)
    kept = 0
    for i in range(len(places)):
        if bins[i] < b:
            places[kept] = places[i]
            kept += 1
    return kept


# Linked by name, as layer.layers_of is: the softmax is part of many compiled calls.
@linked("foretoken_truncate", 4, 3)
def truncate(scores_row, p_row, v, top_k, largest, top_p, min_p):
    """Set p to 0 where a token is not kept, and divide it by the sum of what is left, in place.

    With top_p, the tokens of probability (1 - top_p) / v and less have no more than 1 - top_p together, so that none of
    them is kept; nor are those below min_p * largest. Only the others are looked at.

    scores_row: address of one row of scores, float32 [v].
    p_row: address of a softmax of a multiple of the scores, float32 [v].
    v: number of tokens.
    largest: the largest number of p, in float32.
    top_k, top_p, min_p: as in core.sampling; 0, 1 and 0 keep all.
    """
    scores, p = floats(scores_row, (v,)), floats(p_row, (v,))
    count, least, cut = 0, np.float32(-np.inf), np.float32(0)
    if 0 < top_k < v:
        least = kth(scores, top_k)
    else:  # with room for rounding
        cut = np.float32(0.99 * max((1 - top_p) / v, min_p * largest))
    places = np.empty(v, np.int32)
    for j in range(v):
        if p[j] > cut and scores[j] >= least:
            places[count] = j
            count += 1
    if top_p < 1:
        mass = 1.0
        if 0 < top_k < v:
            mass = 0.0
            for place in places[:count]:
                mass += np.float64(p[place])
        count = nucleus(scores, p, places[:count], top_p * mass)
    weights, left, least_p = np.empty(count, np.float32), 0.0, np.float32(min_p) * np.float32(largest)
    for i in range(count):
        weight = p[places[i]]
        weights[i] = weight if weight >= least_p else 0
        left += np.float64(weights[i])
    for j in range(v):
        p[j] = 0
    for i in range(count):
        p[places[i]] = weights[i] / left


@compiled
def fill(scores, scale, p):
    """Fill p with the softmax of scale scores, all of one row.

    scores: float32 [v], contiguous.
    scale: 1 / temperature, in float32.
    p: is filled, float32 [v], contiguous; it may be scores.

    Returns the sum of exp(scale (scores - their largest)), which is not finite where a score is NaN or +inf, or none is
    finite.
    """
    v = len(scores)
    if v % LANES == 0:
        return softmax_row(scores, scale, p)
    padded = np.empty((v + LANES - 1) // LANES * LANES, np.float32)
    for j in range(v):
        padded[j] = scores[j]
    padded[v:] = -np.inf
    total = softmax_row(padded, scale, padded)
    for j in range(v):
        p[j] = padded[j]
    return total


@compiled
def softmax(scores, scale, p):
    """Fill p with the softmax of scale scores, row by row.

    scores: float32 [m, v], of which each row is contiguous.
    scale: 1 / temperature, in float32.
    p: is filled, float32 [m, v], each row contiguous; it may be scores.

    Returns False where a row has NaN, +inf or nothing finite.
    """
    finite = True
    for i in range(len(scores)):
        finite &= np.isfinite(fill(scores[i], scale, p[i]))
    return finite


@compiled
def truncated_softmax(scores, scale, truncation, p):
    """Do as `softmax`, but over the tokens that are kept.

    scores, scale: as there.
    truncation: top_k, top_p and min_p, as in core.sampling; 0, 1 and 0 keep all.
    p: is filled, float32 [m, v], each row contiguous; not scores, unless all tokens are kept.
    """
    top_k, top_p, min_p = truncation
    cuts = top_k > 0 or top_p < 1 or min_p > 0
    for i in range(len(scores)):
        total = fill(scores[i], scale, p[i])
        if not np.isfinite(total):
            return False
        if cuts:
            of_largest = np.float64(np.float32(1 / total))
            truncate(scores[i].ctypes.data, p[i].ctypes.data, scores.shape[1], top_k, of_largest, top_p, min_p)
    alive((scores, p))
    return True
