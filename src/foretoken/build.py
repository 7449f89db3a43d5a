"""Building an engine from what a caller names: models, a drafter, a tree, a rule."""

import os
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from foretoken.core.default_device import on_cpu_by_default
from foretoken.core.errors import ForetokenError
from foretoken.core.forked import check_not_forked, models_run
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import Coins
from foretoken.core.limits import check_choice, count
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.decode import NoDrafter
from foretoken.draft.acceptance import WEIGHT, Acceptance
from foretoken.draft.auto import auto_drafter
from foretoken.draft.controller import Experience, expected_extra
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.hybrid import HybridDrafter, model_of
from foretoken.draft.lm import LMDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.draft.product import ProductDrafter
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.source import Source
from foretoken.draft.store import Store
from foretoken.draft.store_file import KeptStore
from foretoken.engine import Engine
from foretoken.heads.checkpoint import head_kind, load_head
from foretoken.heads.lm import HeadLM, ready
from foretoken.models.causal_lm import CausalLM, model_name
from foretoken.models.hf_model import HFModel
from foretoken.models.load import (
    check_object,
    check_runs_quantised,
    choose_device,
    choose_dtype,
    drafts_itself,
    eos_ids,
    lay_out_ahead,
    load_drafter,
    load_model,
    load_own,
    may_pack_drafter,
    named_tokenizer,
    wrap_model,
)
from foretoken.models.named import COMPILE, DRAFTING_KIND
from foretoken.models.packed import share_read
from foretoken.models.parts import parts
from foretoken.models.target import LMTarget
from foretoken.models.text import Tokenizer, same_vocabulary
from foretoken.names import check_ahead, check_pair, first_taken, settled, tree_policy
from foretoken.profile import Profile, made_for_another, read_profile
from foretoken.recipe import (
    AUTO,
    FIXED,
    HEAD,
    KINDS,
    METHODS,
    MTP,
    NGRAM,
    NO_DRAFTER,
    ON_STATES,
    OWN,
    PLAIN,
    PLAINLY,
    SAME,
    SUFFIX,
    VOCABS,
    Recipe,
    check_quantise,
    check_quantise_drafter,
    check_store,
    in_a_row,
    is_word,
    own_kind,
    usual_tree,
)
from foretoken.trees.dynamic import ProductTree
from foretoken.vocab.overlap import advised, common
from foretoken.vocab.source import TranslatedSource
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

T = TypeVar("T")
PADDED = 0.9  # the smallest ratio of the vocabulary sizes of two models with one tokenizer: LM heads may be padded


@on_cpu_by_default
def load(
    target: str | os.PathLike[str] | HFModel,
    *,
    drafter: str | os.PathLike[str] | HFModel | None = None,
    method: str = FIXED,
    tree: str | None = None,
    verifier: str | None = None,
    law: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    max_batch: int = 8,
    trust_remote_code: bool = False,
    vocab: str | None = None,
    drafter_tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    compile: str = "auto",
    draft_probability: float | None = None,
    profile: str | os.PathLike[str] | None = None,
    quantise: str | None = None,
    quantise_drafter: str | None = None,
    suffix_store: str | os.PathLike[str] | None = None,
) -> Engine:
    """Load the models and return an engine that decodes the target's texts with the help of a drafter.

    Args:
        target: the folder of a Hugging Face model, a GGUF file, a hub id, the short name of a model that `fetch` has
            brought, or a transformers model.
        drafter: a model with the target's vocabulary, named likewise; the folder of a draft head; "self" (the
            target's own weights in 4 bits, in the target's cache; "self:q8_0" in blocks of that kind); "mtp" (the layer
            of multi-token prediction that some models are published with); "ngram" (prompt lookup) or "suffix" (lookup
            also in the texts of earlier requests), which need no model; "suffix+self", "suffix+FOLDER", "ngram+self"
            and so on: the lookup drafts, or the model where the lookup is expected to gain less; "auto": "ngram",
            unless our kernel runs the target's weights and they have 16 or 32 bits, then "self", and under method auto
            without a profile "ngram+self"; None or "none" for plain decoding. See docs/drafters.md.
        tree: the name of a tree policy, as in `foretoken.tree`; by default chain:5, or with method auto chain:20; for
            a lookup chain:24.
        verifier: the name of a rule, as in `foretoken.verifier`; by default block for a chain, traversal for a tree
            that branches (kary, delayed, sequoia, list), block-transport for budget:N, and exact-match for dynamic:N,
            opt-tree:N, product:N and drafters whose draft tokens have no q (ngram, suffix, vocab slem);
            string-rejection with vocab slrs or union.
        law: the name of the way in which children are drawn, as in `foretoken.law`; by default the law that the
            verifier is made for.
        method: "fixed" drafts `tree` at every step; "auto" drafts it as far as pays, step by step, and does not
            draft where nothing pays. Its depths depend on measured times. So above temperature 0 a seed fixes the
            text only where drafts are matched exactly, or where a profile gives the costs.
        device: where models named by folder run; by default the device of `target` if it is a model object, else the
            first accelerator, else the CPU.
        dtype: what models named by folder compute in; by default the dtype of the checkpoint. A float16 checkpoint runs
            in float32 on a CPU, which holds all of its values and for which there is a kernel. Weights of a GGUF file
            stay packed on a CPU by default; if a dtype is named they are dequantised to it, on other devices and with
            compile "off" to bfloat16.
        tokenizer: a tokenizer, or the name or path of a model that has one; by default the target's. It is needed for
            texts if `target` is a model object.
        max_batch: the most sequences that are decoded side by side.
        trust_remote_code: whether to run Python code that comes with a model's folder.
        vocab: how a drafter with another vocabulary drafts: tli, slem, slrs, union or auto, the default; needs both
            tokenizers. auto is tli where 90% of the target's tokens are the drafter's too, else slem.
        drafter_tokenizer: the drafter's, as `tokenizer`; needed with `vocab` if the drafter is a model object.
        compile: "auto" takes the fastest path that needs no waiting: our compiled kernel for the Llama family and
            packed weights for others in float32 and bfloat16 on a CPU, CUDA graphs on a GPU, plain torch elsewhere.
            "on" also runs torch.compile, on a GPU and where there is no kernel of ours, which takes up to minutes for
            every new shape and is kept on disk. Where compiling or recording fails, one warning says so and the model
            runs as before. "off" is plain torch. All give the same scores but for the order of float sums and, in
            bfloat16, for what is rounded: the kernel rounds only numbers that are multiplied by weights.
        draft_probability: randomised drafting (docs/theory.md, section 6): a coin of this probability before each
            draw; the verifier is then by default randomised on chains, transport on trees. None: there are no coins.
        profile: a file of `foretoken tune`. Its best tree, verifier and draft_probability are used, or plain decoding
            if that was best, unless one of them or a law is given; and its vocab, unless one is named. Method auto
            takes its costs instead of measuring, so that a seed fixes the text, and drafts chains as deep as pays if a
            chain was best.
        quantise: pack the linear layers of models named by folder in blocks of this kind as they are loaded: q8_0,
            q5_1, q5_0, q4_1, q4_k or q4_0 (docs/models-and-hardware.md). It is refused for a target in a GGUF file,
            which is packed as it is.
        quantise_drafter: the kind of blocks for the drafter alone, a model named by folder; "none" leaves its weights
            as they are. By default that of `quantise`, else q4_k where our kernel runs the drafter, no dtype is named
            and trust_remote_code is not set. It changes speed and acceptance, never the distribution of the text.
        suffix_store: a file that keeps the texts of drafter suffix for the next process. It is made where there is
            none, and written now and then and when the process ends.

    Raises:
        ForetokenError: one sentence, for anything that does not fit together.
    """
    target, drafter, profile = _path(target), _path(drafter), _path(profile)
    for what, model in ("target", target), ("drafter", "none" if drafter is None else drafter):
        if not isinstance(model, str | torch.nn.Module) or model == "":
            raise ForetokenError(f"The {what} is {model!r}: give the name or the path of a model, or the model itself.")
        if not isinstance(model, str):
            check_object(model)
    tokenizer, drafter_tokenizer = _path(tokenizer), _path(drafter_tokenizer)
    for what, path in ("profile", profile), ("suffix_store", _path(suffix_store)):
        if path is not None and not isinstance(path, str):
            raise ForetokenError(f"{what} is {path!r}: give the path of a file.")
    max_batch = count("max_batch", max_batch)
    Recipe(method=method)  # refuses a name that is not known
    check_choice("compile", compile, COMPILE)
    check_quantise(quantise, target)

    # What is drafted and which rule decides: refused before models are loaded.
    tuned = None if profile is None else read_profile(profile)
    named = any(x is not None for x in (tree, verifier, law, draft_probability))
    if named and drafter is None and draft_probability is None:  # which says by itself that it needs a drafter
        raise ForetokenError(
            "No drafter is named, and a tree, a verifier and a law are for draft tokens: name one, such as "
            f"{AUTO!r}, or {NO_DRAFTER!r} for plain decoding."
        )
    if tuned is not None and not named:
        tree, verifier, draft_probability = _best(tuned, method)
    Recipe(tree or METHODS[method], verifier, vocab, draft_probability, law, method)  # so do these
    check_store(drafter, suffix_store)
    first, drafter = in_a_row(drafter)
    kind = _kind(drafter)
    has_model = kind == SAME
    check_quantise_drafter(quantise_drafter, drafter, is_head=kind == HEAD)
    if tuned is not None and has_model and vocab in (None, AUTO):
        vocab = tuned.vocab or vocab
    check_not_forked()
    if device is None and not isinstance(target, str):
        device = target.device  # both must be in one place
    chosen_device, chosen_dtype = choose_device(device), choose_dtype(dtype)
    check_runs_quantised(quantise_drafter, chosen_device, compile)
    for source in target, drafter if has_model else None:
        lay_out_ahead(source, chosen_device, chosen_dtype, compile)
    tokenizer = named_tokenizer(tokenizer, target, trust_remote_code)
    drafter_tokenizer = named_tokenizer(drafter_tokenizer, drafter if has_model else None, trust_remote_code)
    translation = None
    if has_model and drafter is not None:
        kind, translation = _vocab_method(vocab, tokenizer, drafter_tokenizer)
    elif vocab is not None:
        raise _no_vocab(vocab, drafter, kind)

    def recipe_of(kind: str) -> Recipe:
        usual = tree or usual_tree(kind, method)
        return Recipe(usual, verifier, kind if kind in VOCABS else None, draft_probability, law, method)

    try:
        if drafter == AUTO:  # the loaded target decides between these two, where both are possible
            kind = first_taken({each: recipe_of(each) for each in (OWN, NGRAM)})
        else:
            check_ahead(recipe_of(kind), kind, _named(drafter or NO_DRAFTER))
    except ForetokenError as error:
        if profile is None or named:
            raise
        raise made_for_another(profile, "drafter") from error

    # The models.
    def causal_lm(source: str | HFModel, blocks: str | None) -> CausalLM:
        if isinstance(source, str):
            return load_model(source, chosen_device, chosen_dtype, trust_remote_code, compile, blocks)
        return wrap_model(source, compile)

    model = causal_lm(target, quantise)
    models_run()
    if drafter == AUTO:
        if not drafts_itself(model, target):
            kind = NGRAM
        # Two in a row need the measured costs of method auto; a profile, bench and tune are for one drafter.
        first = NGRAM if kind == OWN and method == AUTO and tuned is None else None
    recipe = recipe_of(kind)
    policy, _, _ = settled(recipe, kind)
    lm = None
    if kind == MTP:
        from foretoken.heads.mtp import own_mtp  # takes seconds

        lm = ready(own_mtp(model), MTP)
    elif kind == HEAD:
        lm = ready(load_head(str(drafter), parts(model)), str(drafter))
    elif kind == OWN:
        lm = load_own(model, target, own_kind(drafter) or DRAFTING_KIND, trust_remote_code)
    elif has_model and drafter is not None:
        by_default = may_pack_drafter(drafter, chosen_device, chosen_dtype, trust_remote_code, compile)
        lm = load_drafter(partial(causal_lm, drafter), quantise_drafter or quantise, by_default)
        _check_beside(lm, model, alike=kind == SAME and None in (tokenizer, drafter_tokenizer))

    # The engine of them.
    store = None
    if SUFFIX in (first, kind):
        store = Store() if suffix_store is None else KeptStore(os.fspath(suffix_store), model.vocab_size)
    source = replace(_source(kind, model, lm, translation), first=first, store=store)
    if tuned is not None and profile is not None:
        tuned.check(profile, model, source.fingerprint(kind))
    proposing, rule = assembled(recipe, source)
    engine = Engine(LMTarget(model), proposing, rule, tokenizer, eos_ids(model, tokenizer), recipe, source, max_batch)
    best_plain = tuned is not None and method == FIXED and not named and tuned.tree == PLAIN
    if best_plain or isinstance(proposing, NoDrafter):
        return plain(engine)
    if method != AUTO:
        return engine
    return _controlled(engine, policy, tuned)


def _best(tuned: Profile, method: str) -> tuple[str | None, str | None, float | None]:
    """Return the tree, the verifier and the draft probability of a profile; None for each that it leaves open.

    tuned: the profile. method: as in `load`; under method auto a chain's depth is chosen step by step.
    """
    if tuned.tree == PLAIN:
        return None, None, None
    if method == AUTO and tuned.tree.startswith("chain:"):  # its costs are of chains without coins
        return None, tuned.verifier if tuned.draft_probability is None else None, None
    return tuned.tree, tuned.verifier, tuned.draft_probability


def _kind(drafter: str | HFModel | None) -> str:
    """Return the kind of a drafter by its name: SAME for any model, and OWN for "auto" until the target is loaded.

    drafter: a word, the folder of a head, or a model or its name, but not two in a row.
    """
    if isinstance(drafter, str) and head_kind(drafter) is not None:
        return HEAD
    if own_kind(drafter) is not None or drafter == AUTO:
        return OWN
    return str(drafter or NO_DRAFTER) if is_word(drafter) else SAME


def _no_vocab(vocab: str, drafter: object, kind: str) -> ForetokenError:
    """Return the error for a `vocab` that was given for a drafter without a vocabulary of its own."""
    which = f"draft head {drafter}" if kind == HEAD else f"drafter {kind}"
    borrows = kind in (OWN, *ON_STATES) and drafter != AUTO
    why = f"{which} has its target's" if borrows else f"drafter {drafter or NO_DRAFTER} has none"
    return ForetokenError(f"vocab {vocab} is for a drafter model with a vocabulary, and {why}: leave vocab out.")


def _source(kind: str, model: CausalLM, lm: CausalLM | HeadLM | None, translation: Translation | None) -> Source:
    """Return the source of a drafter of this kind.

    lm: the weights that draft, None where there are none.
    translation: between the vocabularies of two tokenizers, None where there are not two.
    """
    if translation is None:
        return Source(kind, model.vocab_size, lm)
    assert isinstance(lm, CausalLM)
    readable = Translation(translation.source, translation.dest.within(lm.vocab_size))
    return TranslatedSource(kind, model.vocab_size, lm, readable)


def _controlled(engine: Engine, policy: TreePolicy, tuned: Profile | None) -> Engine:
    """Return the engine with its drafter under a controller, for method auto; tuned: has the costs, unless measured."""
    proposing, known = engine.drafter, None
    if tuned is not None:
        acceptance = Acceptance(tuned.acceptance * WEIGHT, WEIGHT)
        known = Experience(expected_extra(policy.sizes(), tuned.extra), acceptance, known=True)
    target, drafting = engine.target.lm, engine.source.lm
    share = share_read(drafting, target) if isinstance(drafting, CausalLM) else 0.0
    controlled: Drafter = auto_drafter(model_of(proposing), policy.sizes(), target.device, known, share)
    if isinstance(proposing, HybridDrafter):
        controlled = replace(proposing, inner=controlled)
    return replace(engine, drafter=controlled)


def with_recipe(engine: Engine, recipe: Recipe) -> Engine:
    """Return `engine` with another `recipe` for the same models; an engine without a drafter stays without one.

    Raises ForetokenError for a recipe that does not fit the drafter.
    """
    if recipe.tree == PLAIN:
        return replace(engine, drafter=NoDrafter(), recipe=recipe)
    if isinstance(engine.drafter, NoDrafter):
        return engine
    drafter, rule = assembled(recipe, engine.source)
    return replace(engine, drafter=drafter, verifier=rule, recipe=recipe)


def plain(engine: Engine) -> Engine:
    """Return `engine` without its drafter, for plain decoding."""
    return with_recipe(engine, PLAINLY)


def assembled(recipe: Recipe, source: Source) -> tuple[Drafter, Verifier]:
    """Return the drafter and the rule that a `recipe` makes of a `source`.

    Raises ForetokenError for a pair that would not be lossless.
    """
    kind = recipe.vocab or source.kind
    policy, rule, law = settled(recipe, kind)
    drafter = KINDS[kind].make(source, policy, law)
    if recipe.draft_probability is not None:
        assert isinstance(drafter, LMDrafter)
        drafter = RandomisedDrafter(drafter.lm, policy, Coins(recipe.draft_probability), source.vocab_size)
    check_pair(drafter, rule)
    if source.first is None or isinstance(drafter, NoDrafter):
        return drafter, rule
    if isinstance(drafter, RandomisedDrafter):
        raise ForetokenError(
            f"draft_probability {recipe.draft_probability} needs a drafter that works beside the target, which none "
            f"after {source.first} does: name the model alone."
        )
    longest = tree_policy(usual_tree(source.first, FIXED))
    return HybridDrafter(drafter, LookupDrafter(longest, source.store), policy.sizes()), rule


def head(source: Source, policy: TreePolicy, law: LawFamily) -> HeadDrafter:
    """Return the drafter that draws from a draft head; source, policy, law: as in `recipe.Kind`.

    Raises ForetokenError for a product tree of a head that has no parallel levels.
    """
    lm = source.lm
    assert isinstance(lm, HeadLM)
    if not isinstance(policy, ProductTree):
        return HeadDrafter(lm, policy, law, source.vocab_size)
    serial = lm.head.parallel_from
    if serial is None:
        raise ForetokenError(
            f"Head {lm.name} drafts its levels one after the other, and a product tree needs parallel ones: take a "
            "dynamic tree."
        )
    grown = replace(policy, depth=serial + 1)
    return ProductDrafter(lm, grown, law, source.vocab_size, serial, policy.budget, policy.wide)


def _path(named: T | os.PathLike[str]) -> T | str:
    """Return a path as text; anything else as it is."""
    return os.fspath(named) if isinstance(named, os.PathLike) else named


def _check_beside(drafter: CausalLM, target: CausalLM, alike: bool) -> None:
    """Refuse a drafter on another device than the target's, or with a vocabulary of clearly another size.

    alike: whether both must have one vocabulary, apart from padding of the LM head, and no tokenizers can show it.
    """
    if drafter.device != target.device:
        raise ForetokenError(
            f"Drafter {drafter.name} is on {drafter.device} and target {target.name} on {target.device}: "
            "put both on one device."
        )
    few, many = sorted((drafter.vocab_size, target.vocab_size))
    if alike and few < PADDED * many:
        raise ForetokenError(
            f"Drafter {drafter.name} has {drafter.vocab_size} tokens and target {target.name} {target.vocab_size}, "
            "which is not one vocabulary: pass tokenizer= and drafter_tokenizer=."
        )


def _named(model: str | HFModel) -> str:
    return model if isinstance(model, str) else model_name(model)


def _vocab_method(
    asked: str | None, target: Tokenizer | None, drafter: Tokenizer | None
) -> tuple[str, Translation | None]:
    """Return the kind of a drafter model: SAME, or the name of a method between vocabularies and their translation.

    asked: the method that was named; AUTO for the best one, and so is None where there are both tokenizers.
    target, drafter: their tokenizers; where one is missing there is nothing to compare, and the caller is responsible.
    """
    if target is None or drafter is None:
        if asked is None:
            return SAME, None
        raise ForetokenError(
            f"vocab {asked} needs both tokenizers: pass tokenizer= and drafter_tokenizer= beside model objects."
        )
    best = asked in (None, AUTO)
    if best and same_vocabulary(target, drafter):
        return SAME, None
    translation = Translation(vocabulary(target), vocabulary(drafter))
    return advised(common(translation)) if best else str(asked), translation
