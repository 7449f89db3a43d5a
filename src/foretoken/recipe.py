"""What is drafted and which rule decides, as one value. It needs no models, and it is read without torch.

Every name that a user may give stands here, or in the table that it is taken from, and nowhere else; `names` and
`build` turn names into things.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file
from foretoken.core.lazy import Lazy, imported
from foretoken.core.limits import check_probability
from foretoken.models.folder import check_weights
from foretoken.models.named import (
    NO_MODELS,
    QUANTISED,
    check_compile,
    check_dtype,
    check_quantise,
    head_file,
    is_gguf,
    located,
)
from foretoken.trees.grammar import read_tree
from foretoken.verify import VERIFIERS

if TYPE_CHECKING:
    from foretoken.core.verifier import LawFamily

T = TypeVar("T")
AUTO = "auto"
FIXED = "fixed"
METHODS = {FIXED: "chain:5", AUTO: "chain:20"}  # how the depth of each step is chosen, and the tree by default
PLAIN = "plain"  # stands for a tree where nothing is drafted
# name -> (where it stands, what the tables in the pages say of it)
SCHEMES = {
    "iid": ("core.laws:IID", "independent draws from q"),
    "without_replacement": ("core.laws:WithoutReplacement", "successive draws from q, each token at most once"),
    "hub": ("core.laws:Hub", "the k - 1 likeliest tokens, and one draw from the rest"),
    "opaque": ("core.laws:Opaque", "the likeliest tokens, deterministic"),
}
LAWS: "Lazy[LawFamily]" = Lazy({name: home for name, (home, _) in SCHEMES.items()})


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    home: "module:function" of (source, policy, law) -> Drafter, the module as below `foretoken`.
    about: what the tables in the pages say of it.
    rule: the usual verifier of drafters whose draft tokens have no q; None: the tree decides.
    tree: what it drafts by default; None: the method decides.
    other_vocabulary: whether it is for a model with another vocabulary than the target's.
    own_draws: whether it draws in a fashion of its own, to which a law means nothing.
    """

    home: str
    about: str
    rule: str | None = None
    tree: str | None = None
    other_vocabulary: bool = False
    own_draws: bool = False

    @property
    def make(self) -> Any:
        """The function that `home` names."""
        return imported(self.home)


NO_DRAFTER, NGRAM, SUFFIX, OWN, MTP, SAME, HEAD = "none", "ngram", "suffix", "self", "mtp", "same", "head"
LOOKUPS = (NGRAM, SUFFIX)
ON_STATES = (MTP, HEAD)  # what drafts on the target's hidden states
OWN_KIND = "q4_k"  # with fewer bits more is accepted than in q4_1: docs/LOG.md, 2026-11-26
KINDS = {
    NO_DRAFTER: Kind("decode:no_drafter", "nothing is drafted: plain decoding"),
    NGRAM: Kind("draft.lookup:lookup", "what followed the same words earlier in the text", "exact-match", "chain:24"),
    SUFFIX: Kind(
        "draft.lookup:lookup", "the same in the text and in those of earlier requests", "exact-match", "chain:24"
    ),
    OWN: Kind("draft.own:own", "the target's own weights in 4 bits, in the target's cache"),
    MTP: Kind("build:head", "the target's own layer of multi-token prediction, on its hidden states"),
    SAME: Kind("draft.lm:same", "a language model with the target's vocabulary"),
    HEAD: Kind("build:head", "a draft head on the target's hidden states"),
    "tli": Kind("vocab.tli:tli", "a model's tokens that the target has too", other_vocabulary=True),
    "slem": Kind("vocab.slem:slem", "a model's strings, matched exactly", "exact-match", other_vocabulary=True),
    "slrs": Kind(
        "vocab.slrs:slrs",
        "a model's strings with their exact probability; chains",
        "string-rejection",
        other_vocabulary=True,
        own_draws=True,
    ),
    "union": Kind(
        "vocab.slrs:union",
        "a model's tokens, those that the target lacks always rejected; chains; to compare only",
        "string-rejection",
        other_vocabulary=True,
        own_draws=True,
    ),
}
VOCABS = tuple(name for name, kind in KINDS.items() if kind.other_vocabulary)


@dataclass(frozen=True)
class Recipe:
    """What is drafted and which rule decides, for any pair of models.

    tree: as `foretoken.tree` reads it, or PLAIN. verifier: None for the usual one of the tree and the drafter.
    vocab: how a drafter with another vocabulary drafts. draft_probability: of the coin before each draw (randomised
    drafting). law: how children are drawn; None for the law that the verifier is made for. method: FIXED drafts the
    tree at every step, AUTO only as far as pays. Raises ForetokenError for names that are not known, and for what is no
    probability.
    """

    tree: str = PLAIN
    verifier: str | None = None
    vocab: str | None = None
    draft_probability: float | None = None
    law: str | None = None
    method: str = FIXED

    def __post_init__(self) -> None:
        _check_known("method", self.method, METHODS)
        if self.tree != PLAIN:
            read_tree(self.tree)
        _check_known("verifier", self.verifier, VERIFIERS)
        if self.law is not None:
            check_law(self.law)
        _check_known("vocab", self.vocab, [*VOCABS, AUTO])
        check_probability(self.draft_probability)

    @property
    def name(self) -> str:
        a = "" if self.draft_probability is None else f"a={self.draft_probability:g}"
        return " ".join(filter(None, (self.vocab, self.tree, self.verifier, a)))


def check_law(name: str) -> str:
    """The law's own spelling."""
    name = name.replace("-", "_")
    _check_known("law", name, LAWS)
    return name


def own_kind(drafter: object) -> str | None:
    """The kind of blocks that "self" or "self:KIND" asks the target's weights to be quantised to; None for any other
    drafter. Raises ForetokenError for a kind that is not known."""
    if not isinstance(drafter, str):
        return None
    name, colon, kind = drafter.partition(":")
    if name != OWN:
        return None
    if colon and kind not in QUANTISED:
        raise ForetokenError(f"Drafter {drafter} names no kind of blocks: choose self:KIND, {' or '.join(QUANTISED)}.")
    return kind or OWN_KIND


def in_a_row(drafter: T) -> tuple[str | None, T | str]:
    """The lookup that drafts first and what drafts after it, as ("suffix", "self") for "suffix+self".

    Any other drafter stands alone: (None, drafter). Raises ForetokenError where no model comes after the lookup.
    """
    first, plus, rest = drafter.partition("+") if isinstance(drafter, str) else ("", "", "")
    if first not in LOOKUPS or not plus:
        return None, drafter
    if rest in ("", AUTO, NO_DRAFTER, *LOOKUPS):
        raise ForetokenError(f"Drafter {drafter} names no model after its lookup: say {first}+{OWN} or {first}+FOLDER.")
    return first, rest


def check_alone(drafter: str | None) -> None:
    """Refuse two drafters in a row, where one is measured."""
    if in_a_row(drafter)[0] is not None:
        raise ForetokenError(f"Drafter {drafter} is two in a row, and one is measured here: name one of them.")


def check_store(drafter: Any, path: str | PathLike[str] | None) -> None:
    """Refuse a file for the texts of earlier requests where the drafter remembers none, or that cannot be written."""
    if path is None:
        return
    if SUFFIX not in (drafter, in_a_row(drafter)[0]):
        raise ForetokenError(f"suffix_store is for drafter {SUFFIX}, alone or before a model: leave {path} out.")
    check_file(Path(path))


def check_quantise_drafter(kind: str | None, drafter: object, is_head: bool = False) -> None:
    """Refuse to quantise what is no drafter model in a folder.

    kind: of the blocks; None: nothing was asked. drafter: as `foretoken.load` takes it, none of two in a row. is_head:
    whether it is the folder of a draft head.
    Raises ForetokenError, also for a kind that is not known.
    """
    check_quantise(kind, "quantise_drafter")
    why = None if kind is None else _not_quantised(drafter, is_head)
    if why is not None:
        raise ForetokenError(
            f"quantise_drafter {kind} is for a drafter model named by folder, and {why}: leave it out, or draft with "
            f"{OWN}:{kind}."
        )


def _not_quantised(drafter: object, is_head: bool) -> str | None:
    """Why a drafter has no weights in a folder that are quantised as they are loaded; None where it has."""
    if drafter in (None, NO_DRAFTER):
        return "nothing is drafted"
    if is_word(drafter):
        return f"drafter {drafter} is none"
    if not isinstance(drafter, str):
        return f"{type(drafter).__name__} is a model object"
    if is_head:
        return f"{drafter} is a draft head"
    if head_file(drafter) is None and is_gguf(located(drafter)):
        return f"{drafter} is a GGUF file, whose weights stay as they are"
    return None


def is_word(drafter: object) -> bool:
    """Whether a drafter is named by a word of ours, and is no model, head or place of one."""
    return drafter in (None, *NO_MODELS) or own_kind(drafter) is not None


def usual_tree(kind: str, method: str) -> str:
    """What a drafter of a kind drafts where no tree is named."""
    return KINDS[kind].tree or METHODS[method]


def check_verifier(name: str) -> None:
    _check_known("verifier", name, VERIFIERS)


def check_engine(
    target: str,
    drafter: str | None = None,
    dtype: str | None = None,
    compile: str = AUTO,
    quantise: str | None = None,
    quantise_drafter: str | None = None,
    suffix_store: str | None = None,
    **named: Any,
) -> None:
    """Refuse what `foretoken.load` would refuse anyway, where that can be known before torch is imported.

    named: of a Recipe; None where nothing was named.
    """
    Recipe(**{name: value for name, value in named.items() if value is not None})
    if named.get("tree") == PLAIN:  # which a Recipe can be of, and no user names
        read_tree(PLAIN)
    if dtype is not None:
        check_dtype(dtype)
    check_compile(compile)
    check_quantise(quantise)
    check_store(drafter, suffix_store)
    check_weights(located(target))
    _, drafter = in_a_row(drafter)
    check_quantise_drafter(quantise_drafter, drafter)
    if drafter is not None and not is_word(drafter):
        check_weights(drafter if head_file(drafter) is not None else located(drafter))


def _check_known(what: str, name: str | None, known: Iterable[str]) -> None:
    if name is not None and name not in known:
        raise ForetokenError(f"Unknown {what} {name}: choose one of {', '.join(known)}.")


PLAINLY = Recipe()
