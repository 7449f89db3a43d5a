"""The class of transformers' models for annotations, without its import, which takes seconds and a hundred MiB."""

from typing import TYPE_CHECKING, ForwardRef

import transformers  # which imports its parts when they are asked for

if TYPE_CHECKING:
    HFModel = transformers.PreTrainedModel
else:
    HFModel = ForwardRef("transformers.PreTrainedModel", module=__name__)

__all__ = ["HFModel"]
