"""The models of one benchmark, and the methods of generating that run on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foretoken.build import load, plain, with_recipe
from foretoken.decode import NoDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.engine import Engine
from foretoken.measure.methods import Foretoken, Method, Transformers
from foretoken.models.causal_lm import CausalLM
from foretoken.models.named import AUTO, is_gguf, located
from foretoken.models.packed import dequantised_model
from foretoken.names import tree_policy
from foretoken.recipe import SAME, Recipe, check_alone

LABEL = "cost_label"  # the entry in the config of a model of synthetic cost that says so, for tables
NO_DEPTH = 5  # draft tokens of transformers' constant schedule where no chain is benchmarked


@dataclass(frozen=True)
class Pair:
    """The models of one benchmark, as our engine and as transformers loads them.

    target: transformers' copy of the target.
    drafter: that of the drafter; None unless it is a language model with the target's vocabulary.
    label: a remark on the figures, so that nobody takes a synthetic cost for a real one.
    num_params: the number of the target's parameters.
    """

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
    """Load the models of a benchmark, twice: for our engine, without end-of-text tokens, and as transformers does.

    target, drafter, verifier, vocab, device, dtype, compile: as in `foretoken.load`, but with models named by text.

    Raises ForetokenError where a model cannot be loaded, or for two drafters in a row such as "suffix+self".
    """
    check_alone(drafter)
    engine = load(target, drafter=drafter, verifier=verifier, vocab=vocab, device=device, dtype=dtype, compile=compile)
    engine = replace(engine, eos_ids=frozenset())  # every run has the same length
    lm = engine.target.lm
    theirs = theirs_of(target, lm)
    label = getattr(lm.weights.config, LABEL, "as loaded")
    assistant = None
    if engine.kind == SAME:  # two vocabularies in transformers: see benchmarks/vocab.py
        assistant = theirs_of(str(drafter), lm)  # ours may be packed
    return Pair(engine, theirs, assistant, label, sum(p.numel() for p in theirs.parameters()))


def as_loaded(source: str, like: CausalLM) -> PreTrainedModel:
    """Return a model as transformers loads it, for a comparison with ours, whose weights may be packed.

    source: its folder, GGUF file or name.
    like: our model, loaded from the same source; the result has its dtype and device.
    """
    source = located(source)
    model: Any = (
        dequantised_model(source, like.dtype)
        if is_gguf(source)
        else AutoModelForCausalLM.from_pretrained(source, dtype=like.dtype)
    )
    return model.to(like.device).eval()


def theirs_of(source: str, like: CausalLM) -> PreTrainedModel:
    """Return a model as transformers is to run it: without end-of-text tokens and without sampling defaults of its own.

    source, like: as in `as_loaded`.
    """
    model = as_loaded(source, like)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def methods(
    pair: Pair,
    trees: Sequence[str],
    verifier: str | None,
    batches: Sequence[int],
    draft_probability: float | None = None,
    top_p: float = 1.0,
) -> list[Method]:
    """Return the methods to compare, per batch size: ours, plain and with each tree, and those of transformers.

    Theirs are plain, and at batch size 1 also assisted by the same drafter: once with the depth of the first chain as a
    constant number of draft tokens, and once with transformers' defaults.

    pair: the models.
    batches: the batch sizes.
    trees, verifier, draft_probability: of our engine's recipes, as in Recipe.
    top_p: as in `Engine.generate`, for all methods.
    """
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
    """Return the settings of an assistant that drafts `number` tokens at every step."""
    return {
        "num_assistant_tokens": number,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,  # never stops drafting early
    }
