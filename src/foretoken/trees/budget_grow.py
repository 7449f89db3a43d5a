"""A `budget` tree of one sequence in one compiled call, the drafter's forwards included: node for node the tree that
`BudgetTree.plan` to `select` grow level by level."""

# pyright: reportCallIssue=false

import numpy as np

from foretoken.core.budgeted import ROUNDING, number_loop
from foretoken.kernel.compile import compiled
from foretoken.kernel.draws import pick
from foretoken.kernel.heads import step
from foretoken.kernel.model import Nodes, embed, scores
from foretoken.kernel.sizes import ALL
from foretoken.kernel.softmax import softmax
from foretoken.trees.budget_fast import certainty_loop, share_loop, spend_loop

certainties = compiled(certainty_loop)
shares = compiled(share_loop)
spend = compiled(spend_loop)
number = compiled(number_loop)

NOT_FINITE, NO_UNIFORMS, HUBS = -1, -2, -3  # logits; too few uniforms; a node that would take hub draws


def _on_few(row, k):
    """The share of the row's k largest."""
    rest, total, share = row.copy(), row.sum(), 0.0
    for _ in range(k):
        best = np.argmax(rest)
        share += rest[best] / total
        rest[best] = 0
    return share


on_few = compiled(_on_few, fuse=True)


def _grow_budget(
    drafter, text, factor, threads, u, saved, limits, model, tables, q, tree, scored, made, seen, records, drawn
):  # fmt: skip
    """Grow a tree behind a text, the root last; (nodes, nodes scored, uniforms used), or in place of the
    first the reason why not.

    drafter, text, factor, threads: as kernel.chain.draft_chain takes them.
    u: uniforms, taken in the order in which levels take them. saved [1]: of the ledger, and comes back as it is then.
    limits: levels and draws of this tree, draws of a node, at most; nodes that are left at its end, that may be
    overdrawn; place of the least price; share of q on few tokens from which hub draws may be taken, 0: never.
    model: constants, CHOICES, MORE, EACH, PRICES, ln PRICES, STEPS, WIDE. tables: worth and size by levels to go.
    q [scored, v]. tree [2, nodes]: tokens, parents. seen [2, nodes]: reach, hardness. The root's token and hardness are
    given. scored [nodes]: the node's place among those scored, or -1; made [scored]: its inverse. records [scored, 4]:
    draws at most (0: none), P(so many) where one less may be, else 0, first place and number in `drawn`, the tokens
    drawn.
    """
    levels, cap, most_draws, enough, overdraft, least, hub_share = limits
    constants, choices, more, each, prices, log_prices, steps, wide = model
    depth = tables[0].shape[0] - 1
    tokens, parents = tree[0], tree[1]
    funds = saved[0]
    total_draws, taken_u, places = 0, 0, 0
    num, num_scored = 1, 0
    used = text.start
    root_at = used + len(text.tokens) - 1
    kinds, low = np.zeros(len(drafter.layers.weights), np.int64), drafter.layers.low
    parents[0], scored[0], seen[0, 0] = -1, 0, 1.0
    frontier, level = np.zeros(1, np.int64), 0
    positions = np.arange(used, used + len(text.tokens))
    ids, mask = text.tokens, text.mask
    while True:
        m = len(frontier)
        slots = np.arange(used, used + len(ids)).reshape(1, -1)
        used += len(ids)
        x = np.empty((len(ids), drafter.embedding.shape[1]), np.float32)
        embedded = np.empty_like(x)
        embed(drafter.embedding, ids, embedded)
        step(drafter, embedded, text.states, Nodes(positions, slots, text.row, used, (mask,), kinds), x, threads)
        rows = q[num_scored : num_scored + m]
        scores(x[len(x) - m :], drafter.head, rows, threads)
        if not softmax(rows, factor, ALL, rows):
            return NOT_FINITE, 0, 0
        for i in range(m):
            scored[frontier[i]], made[num_scored + i] = num_scored + i, frontier[i]
        first_row = num_scored
        num_scored += m
        left = min(funds + overdraft, cap - total_draws)
        if level >= levels or left < enough:
            break
        # What plan decides.
        reach, hardness = np.empty(m), np.empty(m)
        for i in range(m):
            reach[i], hardness[i] = seen[0, frontier[i]], seen[1, frontier[i]]
        certainty, share, later = np.empty(m), np.empty((2, m, len(choices))), np.empty((2, m))
        chosen = np.empty(m, np.int64)
        certainties(rows, certainty)
        shares(certainty, hardness, constants, more, each, share, later)
        to_go = depth - level - 1
        found = spend(
            reach, share, later, choices, prices, tables[0][to_go], tables[1][to_go], steps, wide, left, least, chosen
        )
        draws = cap - total_draws
        to_come = np.sum(chosen >= 0)
        width, expected = 0, 0.0
        for i in range(m):
            k, second, distinct = 0, 0.0, 0.0
            if chosen[i] >= 0:
                to_come -= 1
                wanted = choices[chosen[i]]
                most = min(most_draws, draws - to_come)
                if wanted <= 1 or most == 1:
                    k, distinct = 1, 1.0
                elif wanted < 2 - certainty[i]:
                    k, second, distinct = 2, min((wanted - 1) / (1 - certainty[i]), 1.0), wanted
                elif (
                    hub_share > 0
                    and min(int(wanted), most) > 1
                    and certainty[i] * min(int(wanted), most) > 0.98 * hub_share**2
                    and on_few(rows[i], min(int(wanted), most) - 1) > 0.999 * hub_share
                ):
                    return HUBS, 0, 0
                else:
                    numbers, one_more, mean = np.empty(1, np.int64), np.empty(1), np.empty(1)
                    number(rows[i : i + 1], np.full(1, wanted), np.full(1, most), numbers, one_more, mean)
                    k, distinct = numbers[0], mean[0]
                    if one_more[0] >= ROUNDING:
                        k, second = k + 1, one_more[0]
            records[first_row + i, 0], records[first_row + i, 1] = k, second
            if k > 0:
                width = max(width, k if second == 0.0 else k + 1)
                draws -= k
                expected += distinct
        if cap - draws == total_draws:
            break
        funds -= expected
        total_draws = cap - draws
        level += 1
        # What is drawn, and its children.
        first_new, place = num, 0
        for i in range(m):
            k, second = int(records[first_row + i, 0]), records[first_row + i, 1]
            if k == 0:
                continue
            own = taken_u + place * width
            place += 1
            if own + width > len(u):
                return NO_UNIFORMS, 0, 0
            n = k
            if second > 0.0:
                less = 1 - second
                n = k if u[own + width - 1] * (less + second) >= less else k - 1
            records[first_row + i, 2], records[first_row + i, 3] = places, n
            for j in range(n):
                token = pick(rows[i], u[own + j])
                drawn[places + j] = token
                known = False
                for before in range(j):
                    known |= drawn[places + before] == token
                if known:
                    continue
                side = 0 if j == 0 or k == 1 else 1
                tokens[num], parents[num], scored[num] = token, frontier[i], -1
                seen[0, num] = reach[i] * share[side, i, chosen[i]]
                seen[1, num] = later[side, i]
                num += 1
            places += n
        taken_u += place * width
        # What select scores.
        if level >= levels or min(funds + overdraft, cap - total_draws) < enough:
            break
        price, count = np.exp(log_prices[found]), 0
        for i in range(first_new, num):
            count += seen[0, i] > price
        if count == 0:
            break
        frontier = np.empty(count, np.int64)
        count = 0
        for i in range(first_new, num):
            if seen[0, i] > price:
                frontier[count] = i
                count += 1
        ids, positions = tokens[frontier], np.full(count, root_at + level)
        below = np.full((1, 1, count, used + count), low, np.float32)
        below[:, :, :, : root_at + 1] = 0.0
        for i in range(count):
            below[0, 0, i, used + i] = 0.0
            node = parents[frontier[i]]
            while node > 0:
                below[0, 0, i, root_at + scored[node]] = 0.0
                node = parents[node]
        mask = below
    saved[0] = funds
    return num, num_scored, taken_u


grow_budget = compiled(_grow_budget, fuse=True)
