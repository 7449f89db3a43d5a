"""A causal language model that scores token trees: open rows, score nodes, keep a path.

It knows token ids and slots; nothing of text, of sampling or of how a tree came to be.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.models.features import FINAL
from foretoken.models.fused_rows import FusedRows
from foretoken.models.layout import layout
from foretoken.models.llama_kernel import LlamaKernel, llama_kernel
from foretoken.models.modules import Modules
from foretoken.models.panels import PackedLinear
from foretoken.models.probe import check_probe
from foretoken.models.recorder import Recorder
from foretoken.models.rows import Rows
from foretoken.models.static import StaticForward


def model_name(model: PreTrainedModel) -> str:
    """Where it was loaded from, or its class."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


class CausalLM:
    """Any transformers decoder-only causal LM, used read-only.

    name: defaults to where the model was loaded from, or its class. vocab_size: columns of its logits, which may be
    padded beyond the tokenizer's. context: positions it can hold, None if unknown. traced: where it has no kernel
    of ours, compile forwards of fixed shapes, or record them on a GPU. compiled: compile them on a GPU too.
    Raises ForetokenError for models whose state is not per-token keys and values, naming the type found.
    """

    recorder: Recorder | None = None  # of the rows that are opened

    def __init__(self, model: PreTrainedModel, name: str = "", traced: bool = False, compiled: bool = False) -> None:
        self._layout = layout(model)
        self.model = model
        self.name = name or model_name(model)
        self.vocab_size = self._layout.probe.shape[-1]
        self.context = self._layout.context
        kernel = llama_kernel(model)
        compiler = None
        if traced and kernel is None:
            compiled = compiled or model.device.type != "cuda"
            compiler = StaticForward(model, self.name, self._layout.planes, compiled)
        self.backend: LlamaKernel | StaticForward | Modules = kernel or compiler or Modules(model, self._layout)
        check_probe(self, self._layout.probe)
        if compiler is not None:
            compiler.compiling = True

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def execution(self) -> str:
        """How its forwards are run: by "kernel", "torch.compile", "CUDA graphs" (of compiled code, if asked for),
        "panels" (packed weights in transformers' modules) or transformers' "modules" as they are."""
        return self.backend.execution

    @property
    def quantised(self) -> bool:
        """Whether weights are packed in blocks, whose products round the rows that they meet to 8 bits."""
        return any(isinstance(module, PackedLinear) for module in self.model.modules())

    @property
    def num_layers(self) -> int:
        return len(self._layout.planes)

    @property
    def hidden_size(self) -> int:
        config: Any = self.model.config.get_text_config(decoder=True)
        return config.hidden_size

    def recorded_by(self, recorder: Recorder) -> "CausalLM":
        """The same model, whose rows enter `recorder` around their work; see models/recorder.py."""
        lm = copy(self)
        lm.recorder = recorder
        return lm

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> Rows:
        """Room for up to `batch` sequences of `slots` committed tokens and tree nodes each.

        layers: hidden states to keep of every token, see `Rows.features`; those that enter layer 0 .. num_layers - 1,
        or FINAL, those that the LM head reads.
        """
        if batch < 1 or slots < 1:
            raise ForetokenError(f"Cannot open {batch} rows of {slots} slots: both must be at least 1.")
        if not all(layer == FINAL or 0 <= layer < self.num_layers for layer in layers):
            raise ForetokenError(
                f"{self.name} has no hidden states {layers}: give layers 0..{self.num_layers - 1}, or {FINAL} for "
                "those that the LM head reads."
            )
        fused = isinstance(self.backend, LlamaKernel) and self.backend.drafts_chains
        return (FusedRows if fused else Rows)(self, batch, slots, layers)

    @torch.no_grad()
    def states(self, ids: Int[Tensor, "b t"], layers: tuple[int, ...]) -> Float[Tensor, "b t f"]:
        """Hidden states of whole texts by one plain forward without a cache, as `Rows.features` has them."""
        out: Any = self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer] for layer in layers], -1)

    def check_position(self, position: int) -> None:
        if self._layout.hard and self.context is not None and position >= self.context:
            raise ForetokenError(f"Position {position} is past the context of {self.name}, {self.context} positions.")
