"""New heads by name, with the published sizes for a target."""

from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS, check_head
from foretoken.heads.flat import Hydra, Medusa
from foretoken.heads.layer import LayerShape
from foretoken.heads.serial import Eagle, Eagle3, Gumiho
from foretoken.models.parts import TargetParts

Head = Eagle | Gumiho | Eagle3 | Medusa | Hydra


def layer_shape(parts: TargetParts, width: int | None = None) -> LayerShape:
    """A layer as wide as the target's own; width: of what its attention reads, by default the hidden size."""
    return LayerShape(
        parts.hidden, parts.heads, parts.kv_heads, parts.head_dim, parts.intermediate, parts.eps, width or parts.hidden
    )


def eagle(parts: TargetParts, layers: int | None, levels: int | None) -> Eagle:
    return Eagle(parts, layer_shape(parts), layers or 1)


def gumiho(parts: TargetParts, layers: int | None, levels: int | None) -> Gumiho:
    return Gumiho(parts, layer_shape(parts), layers or 2, 5 if levels is None else levels - Gumiho.SERIAL)


def medusa(parts: TargetParts, layers: int | None, levels: int | None) -> Medusa:
    return Medusa(parts, levels or 4, layers or 1)


def hydra(parts: TargetParts, layers: int | None, levels: int | None) -> Hydra:
    return Hydra(parts, layer_shape(parts), levels or 4, layers or 1)


def eagle3(parts: TargetParts, layers: int | None, levels: int | None) -> Eagle3:
    if parts.layers < 4:  # it reads what enters layers 2, n / 2 and n - 3
        raise ForetokenError(f"Head eagle3 needs a target of 4 layers, and {parts.name} has {parts.layers}.")
    return Eagle3(parts, layer_shape(parts, 2 * parts.hidden))


def new_head(kind: str, parts: TargetParts, layers: int | None = None, levels: int | None = None) -> Head:
    """An untrained head. layers: of the Transformer, or blocks of a Medusa or Hydra MLP; levels: depth drafted."""
    check_head(kind)
    if kind in ("eagle", "eagle3") and levels is not None:
        raise ForetokenError(f"Head {kind} drafts to any depth, so that it takes no number of levels.")
    if kind == "eagle3" and layers is not None:
        raise ForetokenError("Head eagle3 has one layer, so that it takes no number of layers.")
    least = 1 + Gumiho.SERIAL if kind == "gumiho" else 1
    if (layers is not None and layers < 1) or (levels is not None and levels < least):
        raise ForetokenError(f"Head {kind} needs at least 1 layer and {least} levels, not {layers} and {levels}.")
    return HEADS[kind](parts, layers, levels).to(device=parts.device)
