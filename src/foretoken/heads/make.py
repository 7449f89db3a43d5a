"""New heads by name, with the published sizes for a target."""

from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS, check_head
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import LayerShape
from foretoken.heads.serial import Eagle, Eagle3, Gumiho
from foretoken.models.features import FINAL
from foretoken.models.parts import TargetParts

Head = Eagle | Gumiho | Eagle3 | Medusa | Hydra


def layer_shape(parts: TargetParts, width: int | None = None) -> LayerShape:
    """A layer as wide as the target's own; width: of what its attention reads, by default the hidden size."""
    return LayerShape(
        parts.hidden, parts.heads, parts.kv_heads, parts.head_dim, parts.intermediate, parts.eps, width or parts.hidden
    )


def eagle(parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> Eagle:
    return Eagle(parts, layer_shape(parts), layers or 1)


def gumiho(parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> Gumiho:
    return Gumiho(parts, layer_shape(parts), layers or 2, 5 if levels is None else levels - Gumiho.SERIAL)


def medusa(parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> Medusa:
    return Medusa(parts, levels or 4, layers or 1)


def hydra(parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> Hydra:
    return Hydra(parts, layer_shape(parts), levels or 4, layers or 1)


def eagle3(parts: TargetParts, layers: int | None, levels: int | None, tokens: Tensor | None) -> Eagle3:
    if parts.layers < 4:  # it reads what enters layers 2, n / 2 and n - 3
        raise ForetokenError(f"Head eagle3 needs a target of 4 layers, and {parts.name} has {parts.layers}.")
    read = (2, parts.layers // 2, parts.layers - 3, FINAL)  # as published, and the last, with which training begins
    head = Eagle3(parts, layer_shape(parts, 2 * parts.hidden), None if tokens is None else len(tokens), read)
    if tokens is not None:
        head.name_tokens(tokens)
    return head


def new_head(
    kind: str, parts: TargetParts, layers: int | None = None, levels: int | None = None, tokens: Tensor | None = None
) -> Head:
    """An untrained head.

    layers: number of layers of the Transformer, or of blocks of a Medusa or Hydra MLP. levels: depth drafted.
    tokens: [m], the target's tokens that the head can draft, in ascending order; None: all of them.
    """
    check_head(kind)
    if kind in ("eagle", "eagle3") and levels is not None:
        raise ForetokenError(f"Head {kind} drafts to any depth, so that it takes no number of levels.")
    if kind == "eagle3" and layers is not None:
        raise ForetokenError("Head eagle3 has one layer, so that it takes no number of layers.")
    if kind != "eagle3" and tokens is not None:
        raise ForetokenError(f"Head {kind} has its target's LM head: only eagle3 can have a trimmed draft vocabulary.")
    least = 1 + Gumiho.SERIAL if kind == "gumiho" else 1
    if (layers is not None and layers < 1) or (levels is not None and levels < least):
        raise ForetokenError(f"Head {kind} needs at least 1 layer and {least} levels, not {layers} and {levels}.")
    return HEADS[kind](parts, layers, levels, tokens).to(device=parts.device)
