"""The probe of a model's forward passes real-looking models in every dtype, and finds forwards that are wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from foretoken.core.errors import ForetokenError
from foretoken.models import probe
from foretoken.models.causal_lm import CausalLM
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.panels import pack
from models_zoo import FAMILIES, tiny
from outliers import DTYPES, outlier_llama
from thinning import one_in

Masks = Mapping[str, np.ndarray | None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_are_no_fault(dtype: torch.dtype, packed: bool) -> None:
    model = outlier_llama(dtype)
    if packed:
        pack(model)
    CausalLM(model)


@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_what_is_not_seen_changes_no_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LEAK", 0.0)
    model = tiny(family)
    CausalLM(model)
    pack(model)
    CausalLM(model)


@pytest.mark.parametrize("family", ["aria", "dbrx"])
def test_rounding_by_the_experts_of_other_nodes_is_no_fault(family: str) -> None:
    """How many nodes an expert computes side by side changes how it rounds."""
    model = tiny(family, random_weights=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    CausalLM(model)


def deaf(masks: Any) -> Any:
    """Every node sees every slot."""
    return None if masks is None else torch.zeros_like(masks)


def sees_siblings(masks: Any) -> Any:
    """Every node also sees the node scored before it."""
    if masks is None or masks.shape[-2] < 2:
        return masks
    masks = masks.clone()
    for node in range(1, masks.shape[-2]):
        masks[..., node, masks.shape[-1] - masks.shape[-2] + node - 1] = 0.0
    return masks


def wrap(model: PreTrainedModel, change: Callable[[dict[str, Any]], None]) -> PreTrainedModel:
    inner: Any = model.model
    forward = inner.forward

    def changed(**inputs: Any) -> Any:
        change(inputs)
        return forward(**inputs)

    inner.forward = changed
    return model


@pytest.mark.parametrize("make", [deaf, sees_siblings, None])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_with_another_mask_or_that_counts_positions_itself_is_found(
    make: Callable[[Any], Any] | None, outliers: bool, dtype: torch.dtype
) -> None:
    def change(inputs: dict[str, Any]) -> None:
        inputs |= {"position_ids": None} if make is None else {"attention_mask": make(inputs.get("attention_mask"))}

    model = wrap(outlier_llama(dtype) if outliers else torch.nn.Module.to(tiny("llama"), dtype), change)
    with pytest.raises(ForetokenError, match="position ids" if make is None else "tree mask"):
        CausalLM(model)


def test_a_model_whose_tree_positions_are_wrong_is_found() -> None:
    """They change with the ids that are given, and are yet others."""

    def twice(inputs: dict[str, Any]) -> None:
        positions = inputs.get("position_ids")
        if positions is not None and positions.shape[1] == 3:
            inputs["position_ids"] = 9 * positions

    model = wrap(tiny("llama"), twice)
    with pytest.raises(ForetokenError, match="otherwise than its paths"):
        CausalLM(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["all seen", "siblings seen", "positions"])
def test_a_kernel_that_is_wrong_is_found(dtype: torch.dtype, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KernelRows.__call__

    def wrong(self: KernelRows, ids: Any, positions: Any, masks: Masks, *rest: Any) -> Any:
        if what == "positions":
            start = int(self.at.slots[0, 0])
            positions = [list(range(start, start + len(row))) for row in ids]
        else:
            make = deaf if what == "all seen" else sees_siblings
            tensors = {kind: None if mask is None else torch.from_numpy(mask) for kind, mask in masks.items()}
            made = {kind: make(mask) for kind, mask in tensors.items()}
            masks = {kind: None if mask is None else mask.numpy() for kind, mask in made.items()}
        return right(self, ids, positions, masks, *rest)

    model = outlier_llama(dtype)
    pack(model)
    CausalLM(model)
    monkeypatch.setattr(KernelRows, "__call__", wrong)
    with pytest.raises(ForetokenError, match="position ids" if what == "positions" else "tree mask"):
        CausalLM(model)


def test_a_kernel_with_wrong_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows mask and positions, and computes something else than transformers does."""
    right = KernelRows.__init__

    def wrong(self: KernelRows, *arguments: Any) -> None:
        right(self, *arguments)
        self.sin[:] *= -1

    model = tiny("llama", random_weights=True, head_dim=16)
    pack(model)
    monkeypatch.setattr(KernelRows, "__init__", wrong)
    with pytest.raises(ForetokenError, match="transformers"):
        CausalLM(model)


def test_probe_tokens_are_ordinary_and_different() -> None:
    for size in (7, 101, 49152, 151936):
        model = tiny("llama", random_weights=True, vocab_size=size, hidden_size=8, intermediate_size=8)
        tokens = probe.probe_tokens(model)
        assert len(set(tokens)) == 6
        assert max(tokens) < 0.6 * size or size < 20
        assert min(tokens) >= size // 10
