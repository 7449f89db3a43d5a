"""The models of one benchmark, and the methods that run on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foretoken.build import load, plain, with_recipe
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.engine import Engine
from foretoken.measure.methods import Foretoken, Method, Transformers
from foretoken.models.causal_lm import CausalLM
from foretoken.models.named import AUTO, is_gguf, located
from foretoken.models.packed import dequantised_model
from foretoken.names import tree_policy
from foretoken.recipe import SAME, Recipe, check_alone

LABEL = "cost_label"  # in the config of a model whose cost is synthetic: what to call it
NO_DEPTH = 5  # drafted tokens of transformers' constant schedule where no chain is benchmarked


@dataclass(frozen=True)
class Pair:
    """engine: ours. target, drafter: transformers' own copies, drafter None without a model. label: what to call the
    rows, so that nobody takes a synthetic cost for a real one. num_params: the target's."""

    engine: Engine
    target: PreTrainedModel
    drafter: PreTrainedModel | None
    label: str
    num_params: int


def load_pair(
    target: str,
    drafter: str | None,
    *,
    verifier: str | None = None,
    vocab: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    compile: str = AUTO,
) -> Pair:
    """The models in two folders; drafter may be a word, as "ngram", or None. vocab: how one with another vocabulary
    drafts."""
    check_alone(drafter)
    engine = load(target, drafter=drafter, verifier=verifier, vocab=vocab, device=device, dtype=dtype, compile=compile)
    engine = replace(engine, eos_ids=frozenset())  # every run has the same length
    lm = engine.target.lm
    theirs = as_loaded(target, lm)
    label = getattr(lm.model.config, LABEL, "as loaded")
    assistant = None
    if engine.kind == SAME:  # theirs is not asked to speak two vocabularies: benchmarks/vocab.py does
        assert isinstance(engine.drafter, LMDrafter)
        assert isinstance(engine.drafter.lm, CausalLM)
        assistant = as_loaded(str(drafter), engine.drafter.lm)
    for model in (theirs, assistant):
        if model is not None:
            model.generation_config = GenerationConfig(pad_token_id=0)  # no EOS, no sampling defaults
    return Pair(engine, theirs, assistant, label, sum(p.numel() for p in theirs.parameters()))


def as_loaded(source: str, like: CausalLM) -> PreTrainedModel:
    """The model as transformers loads it, where `like` may have packed weights.

    like: loaded from the same place, so that errors were already reported then.
    """
    source = located(source)
    model: Any = (
        dequantised_model(source, like.dtype)
        if is_gguf(source)
        else AutoModelForCausalLM.from_pretrained(source, dtype=like.dtype)
    )
    return model.to(like.device).eval()


def methods(
    pair: Pair,
    trees: Sequence[str],
    verifier: str | None,
    batches: Sequence[int],
    draft_probability: float | None = None,
    top_p: float = 1.0,
) -> list[Method]:
    """Ours: plain and every tree, with the verifier named or the tree's default, and coins if any. Theirs: plain; at
    batch 1 also assisted by the same drafter, once with the depth of the first chain as a constant number of drafts and
    once as it comes. top_p: of the texts of all of them."""
    recipes = [Recipe(tree, verifier, draft_probability=draft_probability) for tree in trees]
    engines = [plain(pair.engine), *(with_recipe(pair.engine, recipe) for recipe in recipes)]
    if isinstance(pair.engine.drafter, NoDrafter):
        engines = engines[:1]
    found: list[Method] = []
    for batch in batches:
        found += [Foretoken(replace(engine, max_batch=batch, tokenizer=None), batch, top_p) for engine in engines]
        found.append(Transformers("plain", pair.target, batch, top_p=top_p))
        if batch == 1:
            found += [replace(method, top_p=top_p) for method in _assisted(pair, trees)]
    return found


def _assisted(pair: Pair, trees: Sequence[str]) -> list[Transformers]:
    depth = next((tree_policy(tree).max_nodes - 1 for tree in trees if tree.startswith("chain:")), NO_DEPTH)
    if isinstance(pair.engine.drafter, LookupDrafter):
        return [Transformers(f"lookup {depth}", pair.target, arguments={"prompt_lookup_num_tokens": depth})]
    if pair.drafter is None:
        return []
    return [
        Transformers(
            f"assisted {depth}", pair.target, assistant=pair.drafter, assistant_settings=constant_drafts(depth)
        ),
        Transformers("assisted default", pair.target, assistant=pair.drafter),
    ]


def constant_drafts(number: int) -> dict[str, Any]:
    """Settings of an assistant that drafts so many tokens at every step."""
    return {
        "num_assistant_tokens": number,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,  # never stops drafting early
    }
