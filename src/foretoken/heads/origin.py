"""Which target a head was trained for: told in the head's config.json, and checked where it is loaded."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.models.parts import TargetParts

SAMPLES = 32  # values of the embedding
CLOSE = 0.02  # of the largest; rounding to 16 bits moves a value by less than 0.004 of itself


class UnknownTargetWarning(UserWarning):
    """A head does not tell which target it was trained for; with another one it would draft badly."""


def origin(parts: TargetParts) -> dict[str, Any]:
    """What tells a target from others of its sizes, whatever dtype it is loaded in."""
    return {"name": Path(parts.name).name, "layers": parts.layers, "embedding": _sample(parts)}


def check_origin(config: dict[str, Any], parts: TargetParts, folder: str | Path) -> None:
    """Refuse a head that tells of another target; warn of one that tells of none, as published ones do."""
    told = config.get("target")
    if told is None:
        warnings.warn(
            f"Draft head {folder} does not tell which target it was trained for: if that is not {parts.name}, few of "
            "its drafts will be accepted.",
            UnknownTargetWarning,
            stacklevel=2,
        )
        return
    here = origin(parts)
    try:
        values, own = np.array(told["embedding"], dtype=float), np.array(here["embedding"])
        same = told["layers"] == here["layers"] and values.shape == own.shape
        same = same and bool(np.abs(values - own).max() <= CLOSE * np.abs(values).max())
        name = str(told["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise ForetokenError(f"{folder}/config.json is damaged, its target cannot be: remove that entry.") from error
    if not same:
        raise ForetokenError(
            f"Draft head {folder} was trained for another target ({name}) than {parts.name}: name that one, or train a "
            "head for this one with foretoken train."
        )


def _sample(parts: TargetParts) -> list[float]:
    weight: Any = parts.embedding.weight
    values = weight.detach().flatten()
    chosen = values[:: max(1, len(values) // SAMPLES)][:SAMPLES]
    return [round(x, 6) for x in chosen.float().tolist()]
