"""The MLPs of models with experts over panels: a router, and the matrices of all experts in two stacks.

A stack is one large matrix with the outputs of all experts one behind the other, so that an expert's part is some
neighbouring panels of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.kernel.sizes import COLUMNS

# The classes of transformers, by name, that choose experts by a softmax of the router's scores and have nothing else.
MIXTURES = ("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", "GraniteMoeMoE")
STACKS = ("gate_up_proj", "down_proj")


class PanelMixture(nn.Module):
    """An MLP with experts whose matrices are panels, in transformers' modules; kernel/experts.py is the fast one.

    experts, picks: their number, and how many of them each token has.
    normed: whether the shares of a token's experts are divided by their sum.
    router: the scores of the experts, a PanelLinear.
    gate_up_proj, down_proj: the stacks, each a PanelLinear. The first one has an expert's gate in front of its up.
    """

    def __init__(self, block: nn.Module, router: nn.Module, gate_up: nn.Module, down: nn.Module) -> None:
        """Take numbers and activation from `block`, one of MIXTURES; router, gate_up, down: its matrices."""
        super().__init__()
        own = router_of(block)
        self.experts, self.picks, self.normed = own.num_experts, own.top_k, getattr(own, "norm_topk_prob", True)
        self.router: Any = router
        self.gate_up_proj: Any = gate_up
        self.down_proj: Any = down
        self.act_fn: Any = block.get_submodule("experts.act_fn")

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Return the MLP's outputs for the normed states x [..., d]."""
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = torch.softmax(self.router(rows.float()), -1).topk(self.picks)
        if self.normed:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            nodes, ranks = torch.where(chosen == expert)
            gates, ups = self._part(self.gate_up_proj, expert, rows[nodes]).chunk(2, -1)
            found = self._part(self.down_proj, expert, self.act_fn(gates) * ups)
            out.index_add_(0, nodes, (found * shares[nodes, ranks, None]).to(out.dtype))
        return out.view(x.shape)

    def _part(self, stack: Any, expert: int, rows: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
        """Return the product of rows [n, i] with the matrix of one expert in a stack [n, o]."""
        panels = stack.panels.view(self.experts, -1)[expert]
        return torch.ops.foretoken.panel_product(rows, panels, stack.form, stack.out_features // self.experts)


def is_mixture(module: nn.Module) -> bool:
    """Whether a module, transformers' own or its place in a skeleton, is one that PanelMixture can take the place of.

    Each expert's part of a stack must begin with a panel.
    """
    known = type(module).__name__ in MIXTURES
    if not known or not type(module).__module__.startswith(("transformers.models.", "foretoken.models.")):
        return False
    experts: Any = module.get_submodule("experts")
    return all(stack_sizes(experts, name)[1] // experts.num_experts % COLUMNS == 0 for name in STACKS)


def stack_sizes(experts: Any, name: str) -> tuple[int, int]:
    """Return the inputs and the outputs of a stack as one matrix.

    experts: transformers' module of the experts. name: one of STACKS.
    """
    width, inner, count = experts.hidden_dim, experts.intermediate_dim, experts.num_experts
    return (width, 2 * count * inner) if name == "gate_up_proj" else (inner, count * width)


def put_stack(experts: nn.Module, name: str, stack: nn.Module) -> None:
    """Put a packed stack in the place of a parameter; experts, name: as in `stack_sizes`. stack: a PanelLinear."""
    if hasattr(experts, name):  # a skeleton has none
        delattr(experts, name)
    setattr(experts, name, stack)


def router_of(block: Any) -> Any:
    """Return the router in a `block`, one of MIXTURES."""
    return block.router if hasattr(block, "router") else block.gate
