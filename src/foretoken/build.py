"""An engine from what a caller names: models, a drafter, a tree, a rule."""

import os
from dataclasses import replace
from typing import TypeVar

import torch

from foretoken.choices import AUTO, FIXED, METHODS, NGRAM, VOCABS, check_method, check_vocab
from foretoken.core.errors import ForetokenError
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import IID, Coins, Opaque
from foretoken.core.limits import check_counts
from foretoken.core.policy import TreePolicy
from foretoken.decode import NoDrafter
from foretoken.draft.auto import auto_drafter
from foretoken.draft.controller import FORGET_COST, KNOWN_WEIGHT, MEMORY, Costs, Experience
from foretoken.draft.lm import LMDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.running_fit import RunningFit
from foretoken.drafters import (
    CHAINS_ONLY,
    RULES,
    SAME,
    ModelDrafter,
    default_rule,
    fingerprint_of,
    head_drafter,
    random_rule,
)
from foretoken.engine import Engine
from foretoken.heads.lm import ready
from foretoken.heads.load import head_kind, load_head
from foretoken.models.causal_lm import CausalLM, model_name
from foretoken.models.identity import fingerprint, host
from foretoken.models.load import (
    HFModel,
    choose_device,
    choose_dtype,
    eos_ids,
    load_model,
    load_tokenizer,
    wrap_model,
)
from foretoken.models.named import check_compile
from foretoken.models.overlap import compare
from foretoken.models.parts import parts
from foretoken.models.target import LMTarget
from foretoken.models.text import Tokenizer, same_vocabulary
from foretoken.models.translation import Translation
from foretoken.models.vocabulary import vocabulary
from foretoken.names import check_pair, law_family, policy_for, tree_policy, verifier_named
from foretoken.profile import PLAIN, Profile, read_profile
from foretoken.trees.dynamic import ProductTree, RankedTree
from foretoken.trees.static import StaticTree
from foretoken.verify.block import TreeBlock

T = TypeVar("T")
PADDED = 0.9  # of the larger LM head the least that the smaller one may have if both are of one tokenizer


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
) -> Engine:
    """An engine from a target and a drafter, each a Hugging Face folder (its path), a hub id, or a transformers model.

    drafter: a model with the target's vocabulary; the folder of a draft head (docs/heads.md); "ngram" (prompt lookup,
    needs no model); None or "none" for plain decoding. method: "fixed" drafts `tree` at every step (default chain:5);
    "auto" cuts it (default chain:12) at the depth that pays, step by step, and does not draft where nothing pays. Its
    depths depend on measured times, so that at temperature > 0 a seed does not fix the text, unless a profile tells the
    costs. tree: see `foretoken.tree`.
    verifier: see `foretoken.verifier`; by default block for a chain, rrsw for a tree that branches, block-transport for
    budget:N, exact-match where the drafter has no density. law: how children are drawn; by default the one the verifier
    is made for.
    device: for models named by folder; by default the first accelerator, else the CPU.
    dtype: what models named by folder compute in; by default the dtype of the checkpoint, as in transformers. One in
    float16 runs in float32 on a CPU, which holds all of its values and for which there is a kernel.
    tokenizer: needed for text if `target` is a model object. max_batch: sequences decoded side by side.
    vocab: how a drafter with another vocabulary drafts: tli, slem, slrs, union or auto (docs/vocabularies.md); needs
    both tokenizers, the drafter's as `drafter_tokenizer` if the drafter is a model object.
    compile: "auto" takes the fastest path that needs no waiting: our compiled kernel for the Llama family and packed
    weights for others in float32 and bfloat16 on a CPU, plain torch elsewhere. "on" also runs torch.compile where there
    is no kernel of ours, which takes up to minutes for every new shape and is kept on disk; where it fails, one warning
    tells and the model runs as before. "off" is plain torch. All give the same scores but for the order of float sums
    and, in bfloat16, for what is rounded: the kernel rounds what meets a weight and nothing else.
    draft_probability: randomised drafting (docs/randomised-drafting.md): a coin of this probability before each draw;
    by default with verifier randomised on chains, transport on trees.
    profile: a file of `foretoken tune`: its best tree, verifier and draft_probability, or plain decoding if that was
    best, unless one of them or a law is given; and its vocab, unless one is named. Method auto takes its costs instead
    of measuring, so that a seed fixes the text, and drafts chains as deep as pays if a chain was best.
    Raises ForetokenError, one sentence, for anything that does not fit together.
    """
    target, drafter, profile = _path(target), _path(drafter), _path(profile)
    tokenizer, drafter_tokenizer = _path(tokenizer), _path(drafter_tokenizer)
    check_counts(max_batch=max_batch)
    check_method(method)
    tuned = None if profile is None else read_profile(profile)
    named = any(x is not None for x in (tree, verifier, law, draft_probability))
    if tuned is not None and not named and tuned.tree != PLAIN:
        tree, verifier, draft_probability = tuned.tree, tuned.verifier, tuned.draft_probability
        if method == AUTO and tree.startswith("chain:"):  # its costs are of chains without coins
            tree, draft_probability = METHODS[AUTO], None
            verifier = None if tuned.draft_probability is not None else verifier
    tree = tree or METHODS[method]
    check_compile(compile)
    policy = tree_policy(tree)
    if isinstance(tokenizer, str) or (tokenizer is None and isinstance(target, str)):
        tokenizer = load_tokenizer(str(tokenizer or target), trust_remote_code)
    head = drafter if isinstance(drafter, str) and head_kind(drafter) is not None else None
    has_model = drafter not in (None, "none", "ngram") and head is None
    if tuned is not None and has_model and vocab in (None, AUTO):
        vocab = tuned.vocab or vocab
    if isinstance(drafter_tokenizer, str) or (drafter_tokenizer is None and has_model and isinstance(drafter, str)):
        drafter_tokenizer = load_tokenizer(str(drafter_tokenizer or drafter), trust_remote_code)
    if vocab is not None:
        check_vocab(vocab)
    if vocab is not None and not has_model:
        why = f"draft head {head} has its target's" if head is not None else f"drafter {drafter or 'none'} has none"
        raise ForetokenError(f"vocab {vocab} is for a drafter model with a vocabulary, and {why}: leave vocab out.")
    spelling = SAME
    if has_model and drafter is not None:
        spelling = _vocab_method(vocab, tokenizer, drafter_tokenizer, _named(target), _named(drafter))
    if law is not None and spelling in CHAINS_ONLY:
        raise ForetokenError(
            f"vocab {spelling} draws in a way of its own, to which law {law} means nothing: leave it out."
        )
    if isinstance(policy, ProductTree) and head is None:
        raise ForetokenError(f"Tree {tree} is for draft heads: take chain or kary, or the folder of a head as drafter.")
    if isinstance(policy, ProductTree) and method == AUTO:
        raise ForetokenError(f"Method auto cuts a tree by its depth, and {tree} has no fixed one: take chain or kary.")
    if draft_probability is not None:
        _check_randomised(draft_probability, spelling in RULES or not has_model or head is not None, policy, law)
    way = NGRAM if drafter == NGRAM else spelling
    usual = default_rule(policy, way) if draft_probability is None else random_rule(policy)
    rule = verifier_named(verifier or usual)
    if draft_probability is not None and isinstance(rule, TreeBlock):
        raise ForetokenError(f"draft_probability does not go with verifier {rule.name}: leave the verifier out.")
    if verifier is not None and way in VOCABS and way in RULES and not rule.accepts(Opaque(1)):
        raise ForetokenError(
            f"Verifier {rule.name} needs probabilities that vocab {way} does not give: choose {RULES[way]}, its "
            "usual one."
        )
    family = law_family(law) if law else rule.laws[0]
    policy = policy_for(policy, rule)
    if isinstance(policy, RankedTree) and family is not Opaque:
        raise ForetokenError(
            f"Tree {tree} has the likeliest tokens as children, which only verifier exact-match takes, not {rule.name} "
            f"with law {family.name}: leave both out, or choose tree budget:N."
        )
    if device is None and not isinstance(target, str):
        device = target.device  # both must be in one place
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype)

    def causal_lm(source: str | HFModel) -> CausalLM:
        if isinstance(source, str):
            return load_model(source, chosen_device, chosen_dtype, trust_remote_code, compile)
        return wrap_model(source, compile)

    proposing: Drafter
    model = None
    if head is not None:
        model = causal_lm(target)
        proposing = head_drafter(ready(load_head(head, parts(model)), head), policy, family, model.vocab_size)
    elif drafter is None or drafter == "none":
        proposing = NoDrafter()
    elif drafter == "ngram":
        proposing = NgramDrafter(policy)
    elif spelling == SAME:
        proposing = LMDrafter(causal_lm(drafter), policy, family, 0)
    else:
        assert tokenizer is not None
        assert drafter_tokenizer is not None
        lm = causal_lm(drafter)
        translation = Translation(vocabulary(tokenizer), vocabulary(drafter_tokenizer).within(lm.vocab_size))
        proposing = VOCABS[spelling](lm, translation, policy, family)
    if draft_probability is not None:
        assert isinstance(proposing, LMDrafter)
        proposing = RandomisedDrafter(proposing.lm, policy, Coins(draft_probability), 0)
    known = None
    if tuned is not None and profile is not None:
        model = model or causal_lm(target)
        check_profile(tuned, profile, model, proposing)
        costs = Costs(tuned.plain_s, looks=MEMORY, fit=RunningFit(tuned.extra, FORGET_COST))
        known = Experience(tuned.acceptance, KNOWN_WEIGHT, {1: costs})
        if method == FIXED and not named and tuned.tree == PLAIN:
            proposing, tree = NoDrafter(), PLAIN
    check_pair(proposing, rule)
    model = model or causal_lm(target)
    if isinstance(proposing, LMDrafter) and spelling == SAME and None in (tokenizer, drafter_tokenizer):
        _check_sizes(proposing, model)
    if isinstance(proposing, ModelDrafter):
        if proposing.lm.device != model.device:
            raise ForetokenError(
                f"Drafter {proposing.name} is on {proposing.lm.device} and target {model.name} on {model.device}: "
                "put both on one device."
            )
        proposing = replace(proposing, vocab_size=model.vocab_size)
    if method == AUTO and not isinstance(proposing, NoDrafter):
        proposing = auto_drafter(proposing, policy.sizes(), model.device, known)
        tree = f"auto, at most {tree}"
    return Engine(LMTarget(model), proposing, rule, tokenizer, eos_ids(model, tokenizer), tree, max_batch)


def _path(named: T | os.PathLike[str]) -> T | str:
    """A path as text; anything else as it is."""
    return os.fspath(named) if isinstance(named, os.PathLike) else named


def check_profile(profile: Profile, path: str, target: CausalLM, drafter: Drafter) -> None:
    """Refuse a profile of another machine or of other models."""
    profile.check(path, fingerprint(target), fingerprint_of(drafter), host(target))


def _check_sizes(drafter: LMDrafter, target: CausalLM) -> None:
    """Refuse what cannot be one vocabulary under two paddings of the LM head, where no tokenizers tell."""
    few, many = sorted((drafter.lm.vocab_size, target.vocab_size))
    if few < PADDED * many:
        raise ForetokenError(
            f"Drafter {drafter.name} has {drafter.lm.vocab_size} tokens and target {target.name} {target.vocab_size}, "
            f"which is not one vocabulary: pass tokenizer=, drafter_tokenizer= and vocab={AUTO!r}."
        )


def _check_randomised(draft_probability: float, opaque: bool, policy: TreePolicy, law: str | None) -> None:
    if opaque:
        raise ForetokenError(
            f"draft_probability {draft_probability} needs a drafter with a distribution: a language model, no lookup, "
            "no strings."
        )
    if not isinstance(policy, StaticTree) or policy.floor > 0:
        raise ForetokenError("draft_probability needs a tree whose shape is fixed: chain:D, kary:KxD or list:FILE.")
    if law not in (None, IID.name):
        raise ForetokenError(f"draft_probability makes i.i.d. draws: leave law {law} out.")


def _named(model: str | HFModel) -> str:
    return model if isinstance(model, str) else model_name(model)


def _vocab_method(
    asked: str | None, target: Tokenizer | None, drafter: Tokenizer | None, target_name: str, drafter_name: str
) -> str:
    """The method by which a drafter drafts: SAME where the vocabularies are equal, or must be for want of a method."""
    if target is None or drafter is None:
        if asked is None:
            return SAME  # nothing to compare: the caller vouches for it
        raise ForetokenError(
            f"vocab {asked} needs both tokenizers: pass tokenizer= and drafter_tokenizer= beside model objects."
        )
    if asked is None and not same_vocabulary(target, drafter):
        raise ForetokenError(
            f"Drafter {drafter_name} has another vocabulary than target {target_name}: add vocab={AUTO!r} "
            f"(--vocab {AUTO}), choose a drafter with the same tokenizer, or drafter 'ngram', which needs none."
        )
    if asked is None:
        return SAME
    return compare(target, drafter).method if asked == AUTO else asked
