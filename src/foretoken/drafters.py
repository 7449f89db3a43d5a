"""Drafters by how they draft: the rule that each takes by default, its tree, and its fingerprint."""

from dataclasses import replace

from foretoken.choices import NGRAM, VOCABS
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import Coins
from foretoken.core.policy import TreePolicy
from foretoken.core.verifier import LawFamily, Verifier
from foretoken.decode import NoDrafter
from foretoken.draft.heads import HeadDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.product import ProductDrafter
from foretoken.draft.randomised import RandomisedDrafter
from foretoken.draft.slem import SLEMDrafter
from foretoken.draft.slrs import SLRSDrafter
from foretoken.draft.tli import IntersectionLM
from foretoken.engine import Engine
from foretoken.heads.lm import HeadLM
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint, fingerprint_of_weights
from foretoken.models.segmentation import SingleTokens
from foretoken.models.translation import Translation
from foretoken.names import check_pair, policy_for, tree_policy, verifier_named
from foretoken.profile import PLAIN
from foretoken.trees.budget import BudgetTree
from foretoken.trees.dynamic import ProductTree, RankedTree

ModelDrafter = LMDrafter | SLEMDrafter | SLRSDrafter
SAME, HEAD = "same", "head"
# Rules of drafters whose drafts have no q.
RULES = {NGRAM: "exact-match", "slem": "exact-match", "slrs": "string-rejection", "union": "string-rejection"}
CHAINS_ONLY = ("slrs", "union")


def default_rule(policy: TreePolicy, way: str = SAME) -> str:
    """The rule where none is named. way: how the drafter drafts, as `way_of` tells."""
    if isinstance(policy, RankedTree):
        return "exact-match"
    if way in RULES:
        return RULES[way]
    if isinstance(policy, BudgetTree):
        return "block-transport"
    return "block" if policy.max_draws <= 1 else "rrsw"


def way_of(drafter: Drafter) -> str:
    """NGRAM, HEAD, one of VOCABS, SAME for a language model as it is, "" for all else."""
    if isinstance(drafter, NgramDrafter):
        return NGRAM
    if isinstance(drafter, SLEMDrafter):
        return "slem"
    if isinstance(drafter, SLRSDrafter):
        return "union" if drafter.drafts is SingleTokens else "slrs"
    if not isinstance(drafter, LMDrafter):
        return ""
    if isinstance(drafter.lm, IntersectionLM):
        return "tli"
    return HEAD if isinstance(drafter.lm, HeadLM) else SAME


def fingerprint_of(drafter: Drafter) -> str:
    """How it drafts, and the fingerprint of the weights it does so with; of a language model as it is, that alone."""
    way = way_of(drafter)
    if not isinstance(drafter, ModelDrafter):
        return way
    lm = drafter.lm
    if isinstance(lm, HeadLM):
        head = lm.head
        about = f"{head.kind} {head.depth} {head.feature_scale} {head.feature_layers}"
        return f"{way} {fingerprint_of_weights(head, about)}"
    weights = fingerprint(lm.lm if isinstance(lm, IntersectionLM) else lm)
    return weights if way == SAME else f"{way} {weights}"


def head_drafter(lm: HeadLM, policy: TreePolicy, family: LawFamily, vocab_size: int) -> HeadDrafter:
    """A draft head with a tree. Raises ForetokenError for a product tree of a head that has no parallel levels."""
    if isinstance(policy, ProductTree):
        serial = lm.serial_levels()
        return ProductDrafter(lm, replace(policy, depth=serial), family, vocab_size, serial, policy.budget, policy.wide)
    return HeadDrafter(lm, policy, family, vocab_size)


def lm_drafter(lm: CausalLM | HeadLM, tree: str, verifier: str | None, vocab_size: int) -> tuple[LMDrafter, Verifier]:
    """A model or a head with a tree and the rule named, else the tree's default; refused where it is not lossless."""
    policy = tree_policy(tree)
    rule = verifier_named(verifier or default_rule(policy))
    policy, family = policy_for(policy, rule), rule.laws[0]
    is_head = isinstance(lm, HeadLM)
    drafter = head_drafter(lm, policy, family, vocab_size) if is_head else LMDrafter(lm, policy, family, vocab_size)
    check_pair(drafter, rule)
    return drafter, rule


def vocab_drafter(
    method: str, lm: CausalLM, translation: Translation, tree: str, verifier: str | None, vocab_size: int
) -> tuple[ModelDrafter, Verifier]:
    """The same for a model of another vocabulary, drafting by one of VOCABS. vocab_size: the target's."""
    policy = tree_policy(tree)
    rule = verifier_named(verifier or default_rule(policy, method))
    drafter = VOCABS[method](lm, translation, policy_for(policy, rule), rule.laws[0])
    drafter = replace(drafter, vocab_size=vocab_size)
    check_pair(drafter, rule)
    return drafter, rule


def plain(engine: Engine) -> Engine:
    """The engine without its drafter."""
    return replace(engine, drafter=NoDrafter(), tree=PLAIN)


def random_rule(policy: TreePolicy) -> str:
    """The default of randomised drafting."""
    return "randomised" if policy.max_draws <= 1 else "transport"


def with_tree(
    engine: Engine,
    tree: str,
    verifier: str | None = None,
    vocab: str | None = None,
    draft_probability: float | None = None,
) -> Engine:
    """The engine with another tree, and the rule named, else the tree's default; plain decoding stays what it is.

    vocab: another method of drafting with another vocabulary, for a drafter that has one; by default the same.
    draft_probability: of a coin before each draft (randomised drafting), of a drafter with a distribution.
    """
    drafter, size = engine.drafter, engine.target.vocab_size
    if isinstance(drafter, NoDrafter):
        return engine
    assert not isinstance(drafter, RandomisedDrafter), "its rule goes with its coins"
    policy = tree_policy(tree)
    if draft_probability is not None:
        drafter = with_tree(engine, tree, None, vocab).drafter
        assert isinstance(drafter, LMDrafter)
        rule = verifier_named(verifier or random_rule(policy))
        drafter = RandomisedDrafter(drafter.lm, policy, Coins(draft_probability), size)
        check_pair(drafter, rule)
    elif vocab is not None and vocab != way_of(drafter):
        drafter, rule = vocab_drafter(vocab, *spelling(drafter), tree, verifier, size)
    elif isinstance(drafter, LMDrafter):
        drafter, rule = lm_drafter(drafter.lm, tree, verifier, size)
    else:
        assert isinstance(drafter, NgramDrafter | SLEMDrafter | SLRSDrafter), "no other drafter has a tree"
        rule = verifier_named(verifier or default_rule(policy, way_of(drafter)))
        drafter = replace(drafter, policy=policy)
        check_pair(drafter, rule)
    return replace(engine, drafter=drafter, verifier=rule, tree=tree)


def spelling(drafter: Drafter) -> tuple[CausalLM, Translation]:
    """Of a drafter with another vocabulary, its model and how the target's tokens are spelled in its own."""
    if isinstance(drafter, LMDrafter):
        assert isinstance(drafter.lm, IntersectionLM), "its vocabulary is the target's"
        return drafter.lm.lm, drafter.lm.translation
    assert isinstance(drafter, SLEMDrafter | SLRSDrafter), "it has no vocabulary"
    return drafter.lm, drafter.translation
