"""transformers' models: their class for annotations, without its import, which takes seconds and a hundred MiB, and
what has another name in other versions of transformers."""

import inspect
from typing import TYPE_CHECKING, ForwardRef

import transformers  # which imports its parts when they are asked for
from torch import nn

if TYPE_CHECKING:
    HFModel = transformers.PreTrainedModel
else:
    HFModel = ForwardRef("transformers.PreTrainedModel", module=__name__)

__all__ = ["CACHE_NAMES", "HFModel", "cache_name"]

CACHE_NAMES = "cache", "past_key_values"  # since transformers 5.24, and before


def cache_name(kind: type[nn.Module]) -> str:
    """Return which of `CACHE_NAMES` the forwards of a class of models or layers call their cache.

    kind: a class of transformers, or one with code of its own, which may keep the former name.
    """
    return next(name for name in CACHE_NAMES if name in inspect.signature(kind.forward).parameters)
