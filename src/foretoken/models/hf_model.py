"""transformers' models: their class for annotations, without its import, which takes seconds and a hundred MiB, and
what has another name in other versions of transformers."""

import inspect
from functools import cache
from typing import TYPE_CHECKING, ForwardRef

import transformers  # which imports its parts when they are asked for
from torch import nn

if TYPE_CHECKING:
    HFModel = transformers.PreTrainedModel
else:
    HFModel = ForwardRef("transformers.PreTrainedModel", module=__name__)

__all__ = ["CACHE_NAMES", "HFModel", "cache_name"]

CACHE_NAMES = "cache", "past_key_values"  # since transformers 5.24, and before


@cache
def cache_name(kind: type[nn.Module]) -> str:
    """Return which of `CACHE_NAMES` the forwards of a class of models or layers call their cache.

    kind: a class of transformers, or one with code of its own, which may keep the former name. Where the code names
        neither, but hands on what it is given, it is the former one, which transformers takes in all versions so far.
    """
    present, former = CACHE_NAMES
    return present if present in inspect.signature(kind.forward).parameters else former
