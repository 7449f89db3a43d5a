"""The class of transformers' models for annotations, without its import, which takes seconds and a hundred MiB."""

from typing import TYPE_CHECKING, ForwardRef

if TYPE_CHECKING:
    from transformers import PreTrainedModel as HFModel
else:
    HFModel = ForwardRef("transformers.PreTrainedModel")

__all__ = ["HFModel"]
