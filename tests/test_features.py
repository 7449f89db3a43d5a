"""The hidden states that a scoring forward leaves behind equal those of a plain forward, on every path."""

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.core.errors import ForetokenError
from foretoken.core.tree import path_to
from foretoken.models.causal_lm import CausalLM
from foretoken.models.features import FINAL
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.panels import pack
from foretoken.models.rows import Rows
from models_zoo import FAMILIES, RECURRENT, TOLERANCE, random_parents, text, tiny
from thinning import one_in

LAYERS = (2, FINAL, 0)


def plain_states(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[t, 3d] by one forward without a cache."""
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        final = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([out.hidden_states[2], final, out.hidden_states[0]], -1)[0]


def check(model: PreTrainedModel, rows: Rows, batch: int, exact: PreTrainedModel | None = None) -> None:
    """Random trees and paths on rows of different lengths, one of which leaves; the states are those of `model`.

    exact: the same model in float32, where both `model` and the rows round: then the rows' states may on average be as
        far from those of `exact` as the model's are, since the kernel rounds in fewer places.
    """
    rng = random.Random(0)
    committed = [text(rng, 7 + 3 * r) for r in range(batch)]
    for ids in committed:
        rows.extend(rows.join(), ids)
    for step in range(2):
        tokens = [text(rng, 4 + r) for r in range(batch)]
        parents = [random_parents(rng, 0, 4 + r) for r in range(batch)]
        rows.score(tokens, parents)
        more = [text(rng, 2) for _ in range(batch)]
        rows.score(more, [random_parents(rng, 4 + r, 2) for r in range(batch)])
        paths = [path_to(above, rng.randrange(3, len(above))) for above in parents]
        rows.keep(paths)
        for ids, drafted, path in zip(committed, tokens, paths, strict=True):
            ids += [drafted[i] for i in path]
        if step == 0 and batch > 1:
            rows.leave(0)
            committed[0] = committed.pop()
            batch -= 1
        for row, ids in enumerate(committed):
            got, plain = rows.features(row), plain_states(model, ids)
            if exact is None:
                torch.testing.assert_close(got, plain, rtol=0, atol=TOLERANCE[model.dtype])
            else:
                true = plain_states(exact, ids)
                assert (got - true).abs().mean() <= (plain - true).abs().mean()


CASES = [("llama", 1), *((family, 3) for family in FAMILIES)]


@pytest.mark.parametrize(("family", "batch"), [*CASES, *one_in(3, ((family, 3) for family in RECURRENT))])
def test_generic(family: str, batch: int) -> None:
    model = tiny(family)
    check(model, CausalLM(model).open(batch, 60, LAYERS), batch)


@pytest.mark.parametrize(
    ("family", "batch", "dtype"),
    one_in(
        3,
        [
            (family, 1 if family == "llama" else 3, dtype)
            for family in ("llama", "qwen2_sliding", "qwen3", "granite")
            for dtype in (torch.float32, torch.bfloat16)
        ],
    ),
)
def test_kernel(family: str, batch: int, dtype: torch.dtype) -> None:
    packed, model, exact = [tiny(family, random_weights=True, head_dim=16) for _ in range(3)]
    for each in (packed, model, exact):
        torch.nn.Module.to(each, dtype)
    torch.nn.Module.to(exact, torch.float32)
    pack(packed)
    rows = CausalLM(packed).open(batch, 60, LAYERS)
    assert isinstance(rows.cache, KernelRows)
    check(model, rows, batch, exact if dtype == torch.bfloat16 else None)


def test_logits_do_not_change() -> None:
    packed = tiny("llama", random_weights=True, head_dim=16)
    pack(packed)
    lm = CausalLM(packed)
    scores = []
    for layers in ((), LAYERS):
        rows = lm.open(1, 30, layers)
        rows.extend(rows.join(), [3, 1, 4, 1, 5])
        scores.append(rows.score([[9, 2, 6]], [[-1, 0, 0]])[0])
    assert torch.equal(*scores)


def test_refused() -> None:
    lm = CausalLM(tiny("llama"))
    with pytest.raises(ForetokenError, match="has no hidden states"):
        lm.open(1, 8, (3,))
    rows = lm.open(1, 8)
    rows.join()
    with pytest.raises(ForetokenError, match="keep no hidden states"):
        rows.features(0)
