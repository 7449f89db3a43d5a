"""A causal language model that scores token trees: open rows, score nodes, keep a path.

It deals with token ids and slots alone: text, sampling and the choice of a tree are the business of other modules.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ForetokenError
from foretoken.core.shapes import Float, Int
from foretoken.models.features import FINAL
from foretoken.models.fused_rows import FusedRows
from foretoken.models.hf_model import HFModel
from foretoken.models.layout import layout
from foretoken.models.llama_kernel import LlamaKernel, llama_kernel
from foretoken.models.modules import Modules
from foretoken.models.panels import PackedLinear
from foretoken.models.probe import check_probe, first_forward
from foretoken.models.recurrent import RecurrentRows, check_states
from foretoken.models.rows import Rows
from foretoken.models.skeleton import Skeleton
from foretoken.models.static import StaticForward


def model_name(model: HFModel | Skeleton) -> str:
    """Return where `model` was loaded from, or the name of its class where that is not recorded."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


class CausalLM:
    """Any decoder-only causal LM of transformers. It is only read.

    weights: the modules that hold the weights: the transformers model, or its skeleton.
    name: the model's name, for messages.
    vocab_size: columns of its logits, which may be padded beyond the tokenizer's vocabulary.
    context: positions that it can hold, None if unknown.
    backend: what runs its forwards, chosen once.
    recurrent: whether its forwards keep recurrent states, beside keys and values or alone.
    opened: called with all rows that are opened, so that clocks can be put on them.
    """

    recurrent: bool = False
    opened: Callable[[Rows], object] = staticmethod(lambda rows: None)

    def __init__(self, model: HFModel | Skeleton, name: str = "", traced: bool = False, compiled: bool = False) -> None:
        """Choose how the forwards run, and check by a probe that they follow the tree mask.

        model: in evaluation mode; its weights may be packed (panels.py).
        name: by default where the model was loaded from, or its class.
        traced: where our kernel does not run the model, compile forwards of fixed shapes; on a GPU, record them.
        compiled: on a GPU, compile them before they are recorded.

        Raises ForetokenError for a model that keeps states of a kind that is not known, for one that fails the
        probe and for one whose forward raises an error there; the message names the type found.
        """
        kernel = llama_kernel(model) if isinstance(model, Skeleton) else None
        if isinstance(model, Skeleton) and kernel is None:
            model = model.whole
        self._layout = model.layout if isinstance(model, Skeleton) else layout(model)
        kernel = kernel or llama_kernel(model)
        if kernel is not None:  # which keeps what short convolutions read in slots, and no states
            self._layout = replace(self._layout, states=())
        self.weights = model
        self.name = name or model_name(model)
        self.vocab_size = self._layout.probe.shape[-1]
        self.context = self._layout.context
        self.recurrent = len(self._layout.states) > 0
        compiler = None
        if traced and kernel is None and not self.recurrent:
            compiled = compiled or model.device.type != "cuda"
            compiler = StaticForward(self.model, self.name, self._layout.planes, compiled)
        self.backend: LlamaKernel | StaticForward | Modules = kernel or compiler or Modules(self.model, self._layout)
        if not (isinstance(model, Skeleton) and model.probed):
            # Packed layers work, since `layout` has run them.
            with first_forward(self.weights, own=isinstance(self.backend, Modules)):
                if self.recurrent:
                    check_states(self)
                check_probe(self)
        if compiler is not None:
            compiler.compiling = True

    @property
    def model(self) -> HFModel:
        """The transformers model. That of a skeleton is made when it is first asked for, which takes seconds."""
        return self.weights.whole if isinstance(self.weights, Skeleton) else self.weights

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def execution(self) -> str:
        """How its forwards run: by "kernel", "torch.compile", "CUDA graphs", "CUDA graphs of torch.compile", "panels"
        (packed weights in transformers' modules) or transformers' "modules" as they are."""
        return self.backend.execution

    @property
    def quantised(self) -> bool:
        """Whether weights are packed in quantised blocks. Their products round the input rows to 8 bits."""
        return any(isinstance(module, PackedLinear) for module in self.weights.modules())

    @property
    def limit(self) -> int | None:
        """The number of positions that can be used; None where more than `context` can."""
        return self.context if self._layout.hard else None

    @property
    def num_layers(self) -> int:
        return len(self._layout.planes)

    @property
    def hidden_size(self) -> int:
        config: Any = self.weights.config.get_text_config(decoder=True)
        return config.hidden_size

    def open(self, batch: int, slots: int, layers: tuple[int, ...] = ()) -> Rows:
        """Open rows for up to `batch` sequences of `slots` slots each.

        batch: the largest number of rows.
        slots: per row, for committed tokens and tree nodes together.
        layers: which hidden states to keep of every token, see `Rows.features`: l stands for those that enter layer l,
            0 <= l < num_layers, and FINAL for those that the LM head reads.

        Raises ForetokenError for numbers out of these ranges.
        """
        if batch < 1 or slots < 1:
            raise ForetokenError(f"Cannot open {batch} rows of {slots} slots: both must be at least 1.")
        if not all(layer == FINAL or 0 <= layer < self.num_layers for layer in layers):
            raise ForetokenError(
                f"{self.name} has no hidden states {layers}: give layers 0..{self.num_layers - 1}, or {FINAL} for "
                "those that the LM head reads."
            )
        if self.recurrent:
            return RecurrentRows(self, batch, slots, layers)
        fused = isinstance(self.backend, LlamaKernel) and self.backend.drafts_chains
        return (FusedRows if fused else Rows)(self, batch, slots, layers)

    @torch.no_grad()
    def states(self, ids: Int[Tensor, "b t"], layers: tuple[int, ...]) -> Float[Tensor, "b t f"]:
        """Return the hidden states of whole texts [b, t, f], by one plain forward without a cache.

        ids: b texts of t token ids each [b, t].
        layers: as in `open`; the states of all of them stand side by side, in this order.
        """
        out: Any = self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer] for layer in layers], -1)

    def check_position(self, position: int) -> None:
        """Raise ForetokenError where `position`, counted from 0, lies past a context that must not be exceeded."""
        if self.limit is not None and position >= self.limit:
            raise ForetokenError(f"Position {position} is past the context of {self.name}, {self.limit} positions.")
