"""EAGLE and Gumiho draft with decoder layers on (embedding, state); Gumiho drafts later levels with MLPs at once."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float
from foretoken.heads.checkpoint import Checkpoint
from foretoken.heads.head import Backend
from foretoken.heads.layer import Attend, DecoderLayer
from foretoken.heads.serial import SerialLayers, SerialRows
from foretoken.models.parts import LayerShape, TargetParts


class Eagle(SerialLayers):
    """EAGLE-1 and 2: decoder layers on Linear(embedding, state), as published one without input norm.

    Source: Li et al. 2024, EAGLE.
    """

    kind = "eagle"
    marks = (r"fc\.weight$",)

    def __init__(self, parts: TargetParts, shape: LayerShape, num_layers: int = 1, bias: bool = True) -> None:
        """Make an untrained head.

        parts: what the head borrows of its target.
        shape, num_layers: sizes and number of its decoder layers.
        bias: whether the linear layer in front of them has a bias.
        """
        super().__init__(parts, shape, num_layers)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=bias)
        self.layers = nn.ModuleList(DecoderLayer(shape, input_norm=i > 0) for i in range(num_layers))

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Eagle":
        return cls(parts, parts.shape, layers or 1)

    @classmethod
    def read(cls, checkpoint: Checkpoint, **more: int) -> "Eagle":
        checkpoint.check("hidden size", checkpoint.size("fc.weight")[1] // 2, checkpoint.parts.hidden)
        shape, layers = checkpoint.layer_shape("layers.0."), checkpoint.count(r"layers\.(\d+)\.")
        head = cls(checkpoint.parts, shape, layers, bias="fc.bias" in checkpoint.weights, **more)
        head.take_own(checkpoint)
        return head

    def joined(self, embedded: Float[Tensor, "*n d"], states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Return what the layers read for tokens: the linear layer on their embeddings and states [*n, d].

        embedded: the embeddings of the tokens [*n, d].
        states: the states before the tokens [*n, d].
        """
        return self.fc(torch.cat((embedded.to(states.dtype), states), -1))

    def step(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attends: list[Attend]) -> Tensor:
        x = self.joined(embedded, states)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, cos, sin, attend)
        return x


class Block(nn.Module):
    """A block of Gumiho's MLPs: x + SiLU(Linear x), without the residual x where the width changes."""

    def __init__(self, width: int, hidden: int) -> None:
        """Make an untrained block; width, hidden: channels of x and of the result."""
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.residual = width == hidden

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of x [..., width], as [..., hidden]."""
        y = torch.nn.functional.silu(self.linear(x))
        return x + y if self.residual else y


class Gumiho(Eagle):
    """Gumiho: two decoder layers draft two levels one after the other, then MLPs draft all further levels at once.

    Let y and z be the tokens at depths 1 and 2 below the root x_{i+1}. They are drawn from the states o_i and o_{i+1},
    which stand for h_{i+1} and h_{i+2}. Every MLP reads joined(y, o_i) and joined(z, o_{i+1}). MLP j, from 0 on, makes
    the state of position i + 3 + j, from which the token at depth 3 + j is drawn, whatever tokens stand between depth 2
    and that one. Source: Li et al. 2025, Gumiho, equations 7 to 10; blocks as in its Table 5 and its released code.
    """

    kind = "gumiho"
    marks = (r"fc\.weight$", r"mlp\.")
    SERIAL: ClassVar[int] = 2  # number of levels that the decoder layers draft
    least_levels = SERIAL + 1
    parallel_from = SERIAL

    def __init__(
        self, parts: TargetParts, shape: LayerShape, num_layers: int = 2, num_mlps: int = 5, num_blocks: int = 6,
        bias: bool = True,
    ) -> None:  # fmt: skip
        """Make an untrained head.

        parts, shape, num_layers, bias: as in `Eagle`.
        num_mlps: number of MLPs, one per level below depth 2.
        num_blocks: blocks per MLP.
        """
        super().__init__(parts, shape, num_layers, bias)
        d = shape.hidden
        self.mlp = nn.ModuleList(
            nn.Sequential(*(Block(2 * d if i == 0 else d, d) for i in range(num_blocks))) for _ in range(num_mlps)
        )
        self.depth = self.SERIAL + num_mlps

    @classmethod
    def new(cls, parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> "Gumiho":
        return cls(parts, parts.shape, layers or 2, 5 if levels is None else levels - cls.SERIAL)

    @classmethod
    def read(cls, checkpoint: Checkpoint, **more: int) -> "Eagle":
        if "foretoken_head" in checkpoint.config and checkpoint.config.get("mlp_input") != "fc":
            raise ForetokenError(
                f"{checkpoint.path} was trained by an earlier foretoken, whose MLPs do not read the drafted tokens as "
                "Gumiho's do, so that it would draft badly: train it again with foretoken train gumiho."
            )
        mlps, blocks = checkpoint.count(r"mlp\.(\d+)\."), checkpoint.count(r"mlp\.0\.(\d+)\.")
        return super().read(checkpoint, num_mlps=mlps, num_blocks=blocks)

    def config(self) -> dict[str, Any]:
        return super().config() | {"mlp_input": "fc"}

    def cut(self, levels: int) -> None:
        """Drop the MLPs of all levels but the first `levels`.

        Raises ForetokenError for fewer than SERIAL levels, or more than the head has.
        """
        most = self.SERIAL + len(self.mlp)
        if not self.SERIAL <= levels <= most:
            raise ForetokenError(f"Gumiho's head drafts {self.SERIAL} to {most} levels, not {levels}.")
        self.mlp, self.depth = self.mlp[: levels - self.SERIAL], levels

    def parallel(self, both: Float[Tensor, "*n w"]) -> Float[Tensor, "*n m d"]:
        """Return the states that all m MLPs make [*n, m, d]; both: `joined` of y and z side by side [*n, 2d]."""
        return torch.stack([mlp(both) for mlp in self.mlp], -2)

    def open(self, batch: int, slots: int, backend: Backend | None) -> "GumihoRows":
        return GumihoRows(self, batch, slots, backend)


class GumihoRows(SerialRows):
    """The rows of Gumiho: the decoder layers draft two levels, the MLPs all others at once below each depth-2 node."""

    @torch.inference_mode()
    def _score(self, firsts: list[int]) -> list[Float[Tensor, "_ v"]]:
        new = [range(first, len(row.tree)) for row, first in zip(self.rows, firsts, strict=True)]
        levels = [[row.level(node) for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        if all(level < Gumiho.SERIAL for of_row in levels for level in of_row):
            return super()._score(firsts)
        # The MLPs' levels take no slots: nodes there are in the tree only so that they can be named.
        owners = [[row.above(node)[Gumiho.SERIAL] for node in nodes] for row, nodes in zip(self.rows, new, strict=True)]
        self._run_parallel({(row, owner) for row, of_row in enumerate(owners) for owner in of_row})
        out = []
        for row, of_row, its_levels in zip(self.rows, owners, levels, strict=True):
            scores = [row.parallel[p][level - Gumiho.SERIAL] for p, level in zip(of_row, its_levels, strict=True)]
            out.append(torch.stack(scores) if scores else self._none())
            row.states += row.states[:1] * len(of_row)  # never read: their children are parallel too
        return out

    @torch.inference_mode()
    def parallel_scores(self, places: Sequence[tuple[int, int]]) -> Float[Tensor, "n m v"]:
        """Return the logits of all the MLPs' levels below nodes at depth 2 [n, m, v]; places: see `LevelRows`."""
        self._run_parallel(set(places))
        return torch.stack([self.rows[row].parallel[node] for row, node in places])

    def _run_parallel(self, places: set[tuple[int, int]]) -> None:
        """Run all MLPs, then the LM head, for every (row, depth-2 node) of `places` that has no logits yet."""
        new = sorted((row, node) for row, node in places if node not in self.rows[row].parallel)
        if not new:
            return
        paths = [(self.rows[row], self.rows[row].above(node)) for row, node in new]
        tokens = torch.tensor([[row.tokens[node] for node in path[1:]] for row, path in paths])
        embedded = self.head.embed(tokens.to(self.target.device))
        states = torch.stack([torch.stack([row.states[node] for node in path[:-1]]) for row, path in paths])
        if self.kernel is None:
            parallel = self.head.parallel(self.head.joined(embedded, states).flatten(-2))
        else:
            parallel = self.kernel.parallel(embedded, states)
        for (row, path), scores in zip(paths, self.head.logits(parallel), strict=True):
            row.parallel[path[-1]] = scores
