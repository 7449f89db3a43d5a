"""The layers of an EAGLE or Gumiho head in the compiled kernel: packed weights on a CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretoken.core.shapes import Float
from foretoken.heads.serial import Eagle, Gumiho
from foretoken.models.kernel_layers import LANES, KernelLayers, KernelSlots, array, bias_of, chain_outputs
from foretoken.models.panels import PanelLinear, use_threads
from foretoken.models.parts import TargetParts

NEVER = 2**62  # levels after which an EAGLE head would turn to MLPs


class EagleKernel(KernelLayers):
    """The weights of one head in the form that the kernel reads; shared by all rows.

    serial: levels before those of Gumiho's MLPs. fc, mlps, last: as kernel_chain takes them. embedding, unembedding:
    the target's, where they are a table and a packed product and nothing else changes states or scores; else None,
    as is `last`.
    """

    def __init__(self, head: Eagle, fc: PanelLinear) -> None:
        shape, target = head.shape, head.target
        scale, kinds = shape.head_dim**-0.5, [None] * head.num_layers
        super().__init__(
            list(head.layers), shape.head_dim, scale, shape.eps, lambda n: target.angles(torch.arange(n)), kinds
        )
        self.enter, self.fc = fc, (fc.address, fc.form, bias_of(fc))
        self.serial = Gumiho.SERIAL if isinstance(head, Gumiho) else NEVER
        self.blocks: list[list[PanelLinear]] = _blocks(head)  # the addresses below point into their panels
        self.mlps = _addresses(self.blocks)
        self.embedding = self.unembedding = self.last = None
        table, last = target.embedding, target.unembedding
        if type(table) is nn.Embedding and isinstance(last, PanelLinear) and _plain(target):
            self.embedding, self.unembedding = array(table.weight), last
            bias = np.zeros(0, np.float32) if last.bias is None else bias_of(last)
            self.last = (last.address, last.form, bias, np.float32(head.feature_scale))


class EagleSlots(KernelSlots):
    """The slot cache of a batch, `Eagle.step` over it, and whole chains."""

    layers: EagleKernel

    def step(
        self,
        embedded: Float[Tensor, "b n d"],
        states: Float[Tensor, "b n d"],
        positions: np.ndarray,
        mask: np.ndarray | None,
    ) -> Float[Tensor, "b n d"]:
        """For the nodes whose slots were aimed at. positions [b, n]; mask [b, 1, n, used] of 0 and low, or None."""
        x = self.layers.enter(torch.cat((embedded.float(), states.float()), -1))
        self.run(x.view(-1, x.shape[-1]).numpy(), positions.reshape(-1), {"": mask})
        return x

    def parallel(self, first: Float[Tensor, "n d"], second: Float[Tensor, "n d"]) -> Float[Tensor, "n m d"]:
        """`Gumiho.parallel`."""
        from foretoken.heads.kernel_chain import parallel

        n, d = first.shape
        out = np.empty((n, len(self.layers.mlps[0]), d), np.float32)
        parallel(torch.cat((first, second), -1).float().numpy(), self.layers.mlps, out, use_threads())
        return torch.from_numpy(out)

    @property
    def drafts_chains(self) -> bool:
        return self.layers.last is not None

    def draft_chain(
        self, row: int, read: Sequence[int], states: Float[Tensor, "m d"], start: int, u: Float[Tensor, "n 1"],
        temperature: float, floor: float,
    ) -> tuple[list[int], Float[Tensor, "_ v"], Float[Tensor, "_ d"]]:  # fmt: skip
        """As KernelRows.draft_chain, with the states that go with the tokens `read`; also the states made of the nodes,
        which are zeros where no forward was run."""
        from foretoken.heads.kernel_chain import draft_head_chain

        k, levels, m = self.layers, len(u), len(read)
        assert k.embedding is not None
        assert k.unembedding is not None
        factor, q, tokens = chain_outputs(levels, k.unembedding.out_features, temperature)
        made = np.zeros((m + levels - 1, k.embedding.shape[1]), np.float32)
        done = draft_head_chain(
            np.array(read), states.float().numpy(), row, *self._chain(read, start, k.embedding), k.fc, k.serial,
            k.mlps, k.last, u.numpy(), factor, floor, use_threads(), q, tokens, made,
        )  # fmt: skip
        return tokens[:done].tolist(), torch.from_numpy(q[:done]), torch.from_numpy(made[: m + done - 1])


def eagle_kernel(head: Eagle) -> EagleKernel | None:
    """None where the head's layers are not packed, or the kernel does not know their sizes."""
    unknown = head.shape.head_dim % LANES or (isinstance(head, Gumiho) and head.shape.hidden % LANES)
    return EagleKernel(head, head.fc) if isinstance(head.fc, PanelLinear) and not unknown else None


def _plain(target: TargetParts) -> bool:
    """Whether its embedding and LM head are a table and a product alone, and every token that it can draw is in the
    table, since compiled loops do not look."""
    changes = (target.embedding_scale, target.logit_scale, target.softcap) != (1.0, 1.0, None)
    return not changes and len(target.embedding.get_parameter("weight")) >= target.vocab_size


def _blocks(head: Eagle) -> list[list[PanelLinear]]:
    mlps: Any = head.mlp if isinstance(head, Gumiho) else ()
    return [[block.linear for block in mlp] for mlp in mlps]


def _addresses(mlps: list[list[PanelLinear]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What kernel_chain.parallel takes."""
    blocks, d = (len(mlps[0]), mlps[0][0].out_features) if mlps else (0, 0)
    addresses, forms = np.zeros((len(mlps), blocks), np.int64), np.zeros((len(mlps), blocks), np.int64)
    biases = np.ones((len(mlps), blocks, 2 * d), np.float32)
    for j, mlp in enumerate(mlps):
        addresses[j] = [linear.address for linear in mlp]
        forms[j] = [linear.form for linear in mlp]
        biases[j, :, :d] = [bias_of(linear) for linear in mlp]
    return addresses, forms, biases
