"""What `budget_grow` takes of a policy, and the tree made of what it leaves."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.budgeted import law_with
from foretoken.core.policy import Call, LoneTree
from foretoken.core.shapes import Float
from foretoken.core.tree import Siblings, TokenTree
from foretoken.trees.budget import ADVANCE, CAP, ENOUGH, HUB_SHARE, PRICES, BudgetTree, Ledger, Node
from foretoken.trees.budget_grow import grow_budget
from foretoken.trees.gain import CHOICES, EACH, MORE, PRICE, STEPS, WIDE


def grow_alone(
    policy: BudgetTree,
    root: Node,
    token: int,
    levels: int,
    vocab_size: int,
    u: Float[Tensor, " n"],
    call: Call,
) -> LoneTree | None:
    """`BudgetTree.grow_alone`."""
    most = CAP * policy.budget
    ledger, forecast, size = root.ledger, policy._forecast, 1 + most
    tree, scored, made = np.empty((2, size), np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    q, seen = np.empty((size, vocab_size), np.float32), np.empty((2, size))
    records, drawn = np.zeros((size, 4)), np.empty(most, np.int64)
    tree[0, 0], seen[1, 0] = token, root.hardness
    saved = np.array([ledger.saved])
    hubs = HUB_SHARE if policy.hub else 0.0
    limits = min(levels, policy.depth), most, policy.max_draws, ENOUGH, ADVANCE * policy.budget, ledger.least, hubs
    model = forecast.gain.constants, CHOICES, MORE, EACH, PRICES, PRICE, STEPS, WIDE
    counts = (0, 0, 0)

    def grow(*state: Any) -> list[int] | None:
        nonlocal counts
        counts = grow_budget(
            *state, u.numpy(), saved, limits, model, forecast.tables, q, tree, scored, made, seen, records, drawn
        )
        return scored[tree[1, made[1 : counts[1]]]].tolist() if counts[0] > 0 else None

    if not call(grow):
        return None
    num, num_scored, num_uniforms = counts
    siblings: list[Siblings | None] = [None] * num
    nodes, rows, draws = made[:num_scored].tolist(), torch.from_numpy(q[:num_scored]).unbind(), drawn.tolist()
    for node, row, (k, second, first, n) in zip(nodes, rows, records[:num_scored].tolist(), strict=True):
        if k:
            siblings[node] = Siblings(
                tuple(draws[int(first) : int(first + n)]), row, law_with(int(k) - (second > 0), second)
            )
    tokens, parents = tree[:, :num].tolist()
    state = Node(0.0, 0.0, Ledger(ledger.account, float(saved[0]), ledger.least))
    return LoneTree(TokenTree(tuple(tokens), tuple(parents), tuple(siblings)), [state], nodes, num_uniforms)
