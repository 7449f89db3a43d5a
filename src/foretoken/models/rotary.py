"""Rotary positions: the angles by which queries and keys are rotated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int

DEFAULT = "default"  # transformers' name of frequencies without scaling
READ = ("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters")  # entries in use


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of attention heads of width dim.

    inv_freq: the rotary frequencies [dim / 2].
    scale: the factor of cosines and sines.
    config: the entries of a config.json that describe them, {} where they are those of a loaded model.
    """

    inv_freq: Float[Tensor, " half"]
    scale: float = 1.0
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def dim(self) -> int:
        """The width of an attention head."""
        return 2 * len(self.inv_freq)

    def angles(self, positions: Int[Tensor, "..."]) -> tuple[Float[Tensor, "... h"], Float[Tensor, "... h"]]:
        """Return the cosines and the sines of `positions` [...], each [..., dim]."""
        angle = positions[..., None].float() * self.inv_freq
        both = torch.cat((angle, angle), -1)
        return both.cos() * self.scale, both.sin() * self.scale


def rotary_of(module: nn.Module, kind: str | None = None) -> Rotary:
    """Return the rotary positions that a `module` of transformers computes, if they do not depend on the text's length.

    kind: the name of the kind of layers, for a module that has frequencies for each kind.
    """
    of_kind = "" if hasattr(module, "inv_freq") else f"{kind}_"
    scale = getattr(module, f"{of_kind}attention_scaling", 1.0)
    return Rotary(getattr(module, f"{of_kind}inv_freq").float(), float(scale))


def usual(dim: int, device: torch.device) -> Rotary:
    """Return rotary positions of base 10000 for heads of width `dim`, on `device`."""
    return Rotary(10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim))


def llama_config(config: Mapping[str, Any], name: str) -> Any:
    """Return the norms and positions in a config.json as a LlamaConfig, None where transformers did not write it.

    Entries that it lacks have Llama's defaults, since transformers writes only those that differ.

    config: the entries of the config.json.
    name: its name for messages.

    Raises ForetokenError where transformers refuses the entries.
    """
    from transformers import LlamaConfig  # takes seconds
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        return LlamaConfig(**{key: config[key] for key in READ if config.get(key) is not None})
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        why = " ".join(str(error).split())  # some errors have two lines
        raise ForetokenError(f"{name} cannot be read ({why}): mend it.") from error


def configured(config: Any, dim: int, name: str, device: torch.device) -> Rotary:
    """Return the rotary positions that a configuration describes.

    config: from `llama_config`; its head_dim is set to `dim`.
    dim: the width of an attention head.
    name: as in `llama_config`.
    device: where the frequencies are to be.

    Raises ForetokenError for a kind of scaling that is not known, and for one whose numbers are missing or do not fit.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # takes seconds

    config.head_dim = dim
    given = dict[str, Any](config.rope_parameters)
    kind = given.get("rope_type", DEFAULT)
    if kind != DEFAULT and (not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS):
        known = ", ".join((DEFAULT, *ROPE_INIT_FUNCTIONS))
        raise ForetokenError(f"{name} scales its rotary positions by {kind}, and only {known} are known.")
    try:
        made: Any = LlamaRotaryEmbedding(config).to(device)
        fits = made.inv_freq.shape == (dim // 2,) and bool(made.inv_freq.isfinite().all())
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ForetokenError(f"{name} does not say how {kind} scales rotary positions ({error}): mend it.") from error
    if not fits:
        raise ForetokenError(f"{name} scales its rotary positions by {kind} with numbers that do not fit: mend it.")
    entries = {
        "model_type": config.model_type,
        "rope_parameters": given,
        "max_position_embeddings": config.max_position_embeddings,
    }
    return Rotary(made.inv_freq.float(), float(made.attention_scaling), entries)
