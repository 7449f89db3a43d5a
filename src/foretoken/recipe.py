"""The recipe: what is drafted and which rule decides, as one value. It needs no models, and importing it no torch.

Every name that a user may give is in this file, or in a table that it imports, and nowhere else; `names` and `build`
make the named objects.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file
from foretoken.core.lazy import Lazy, imported
from foretoken.core.limits import check_choice, check_probability
from foretoken.models.folder import check_weights
from foretoken.models.named import (
    AS_STORED,
    AUTO,
    COMPILE,
    DRAFTING_KIND,
    DTYPES,
    NO_MODELS,
    QUANTISED,
    head_file,
    is_gguf,
    located,
)
from foretoken.trees.forms import read_tree
from foretoken.verify import VERIFIERS

if TYPE_CHECKING:
    from foretoken.core.verifier import LawFamily

T = TypeVar("T")
FIXED = "fixed"
METHODS = {FIXED: "chain:5", AUTO: "chain:20"}  # method -> its default tree
PLAIN = "plain"  # the name in the place of a tree where nothing is drafted
# name -> (its place as "module:attribute", its description in the tables of the documentation)
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

    home: "module:function" of a function (source, policy, law) -> Drafter, the module's name inside `foretoken`:
        source has what drafts, policy is the tree policy, and law says how children are drawn.
    about: its description in the tables of the documentation.
    rule: the default verifier of drafters whose draft tokens have no q; None: the tree decides.
    tree: the default tree; None: the method decides.
    other_vocabulary: whether it is for a model with another vocabulary than the target's.
    own_draws: whether it draws in a way of its own, so that a law cannot be chosen.
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
ON_STATES = (MTP, HEAD)  # kinds that draft from the target's hidden states
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

    tree: the name of a tree policy, as in `foretoken.tree`, or PLAIN for plain decoding.
    verifier: the name of a rule; None for the default of the tree and the drafter.
    vocab: how a drafter with another vocabulary drafts; None where it has the target's.
    draft_probability: the probability of the coin before each draw (randomised drafting); None: there are no coins.
    law: how children are drawn; None for the law that the verifier is made for.
    method: FIXED drafts the tree at every step, AUTO only as far as pays.

    Raises ForetokenError for unknown names, and for a draft probability outside [0, 1].
    """

    tree: str = PLAIN
    verifier: str | None = None
    vocab: str | None = None
    draft_probability: float | None = None
    law: str | None = None
    method: str = FIXED

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS, optional=False)
        if self.tree != PLAIN:
            read_tree(self.tree)
        check_choice("verifier", self.verifier, VERIFIERS)
        if self.law is not None:
            check_law(self.law)
        check_choice("vocab", self.vocab, [*VOCABS, AUTO])
        check_probability(self.draft_probability)

    @property
    def name(self) -> str:
        """The recipe in one line, for tables: vocab, tree, verifier and draft probability, where they are given."""
        a = "" if self.draft_probability is None else f"a={self.draft_probability:g}"
        return " ".join(filter(None, (self.vocab, self.tree, self.verifier, a)))


def check_law(name: str) -> str:
    """Return the name of a law with underscores for hyphens; raises ForetokenError for an unknown one."""
    name = name.replace("-", "_") if isinstance(name, str) else name
    check_choice("law", name, LAWS, optional=False)
    return name


def own_kind(drafter: object) -> str | None:
    """Return the kind of blocks in which drafter "self" or "self:KIND" quantises the target's weights.

    Returns None for any other drafter. Raises ForetokenError for an unknown kind of blocks.
    """
    name, colon, kind = drafter.partition(":") if isinstance(drafter, str) else ("", "", "")
    if name != OWN:
        return None
    if colon and kind not in QUANTISED:
        kinds = " or ".join(f"{OWN}:{known}" for known in QUANTISED)
        raise ForetokenError(f"Drafter {drafter} names no known kind of blocks: choose {kinds}.")
    return kind or DRAFTING_KIND


def in_a_row(drafter: T) -> tuple[str | None, T | str]:
    """Return the lookup that drafts first and the drafter after it, such as ("suffix", "self") for "suffix+self".

    Any other `drafter` stands alone: (None, drafter). Raises ForetokenError where no model comes after the lookup.
    """
    first, plus, rest = drafter.partition("+") if isinstance(drafter, str) else ("", "", "")
    if first not in LOOKUPS or not plus:
        return None, drafter
    if rest in ("", AUTO, NO_DRAFTER, *LOOKUPS):
        raise ForetokenError(f"Drafter {drafter} names no model after its lookup: say {first}+{OWN} or {first}+FOLDER.")
    return first, rest


def check_alone(drafter: str | None) -> None:
    """Refuse a `drafter` that is two in a row, such as "suffix+self", where only one can be measured."""
    if in_a_row(drafter)[0] is not None:
        raise ForetokenError(f"Drafter {drafter} is two in a row, and one is measured here: name one of them.")


def check_store(drafter: Any, path: str | PathLike[str] | None) -> None:
    """Refuse a file for the texts of earlier requests if the drafter keeps none, or if it cannot be written.

    drafter: as `foretoken.load` takes it.
    path: the file; None: there is none, and nothing to check.
    """
    if path is None:
        return
    if SUFFIX not in (drafter, in_a_row(drafter)[0]):
        raise ForetokenError(f"suffix_store is for drafter {SUFFIX}, alone or before a model: leave {path} out.")
    check_file(Path(path))


def check_quantise(kind: str | None, target: object) -> None:
    """Refuse a kind of blocks that is unknown, and to quantise a GGUF file.

    kind: the kind of blocks; None: nothing is to be quantised.
    target: as `foretoken.load` takes it.
    """
    check_choice("quantise", kind, QUANTISED)
    if kind is not None and isinstance(target, str) and is_gguf(located(target)):
        raise ForetokenError(
            f"quantise {kind} is for the weights in a model's folder, and {target} is a GGUF file, whose weights stay "
            "as they are: leave it out. A drafter named by folder is packed by quantise_drafter."
        )


def check_quantise_drafter(kind: str | None, drafter: object, is_head: bool = False) -> None:
    """Refuse to quantise what is no drafter model in a folder.

    kind: the kind of blocks; AS_STORED or None: nothing is to be quantised, and nothing is refused.
    drafter: as `foretoken.load` takes it, but a single one, not two in a row.
    is_head: whether it is the folder of a draft head.

    Raises ForetokenError, also for an unknown kind.
    """
    check_choice("quantise_drafter", kind, (*QUANTISED, AS_STORED))
    if kind in (None, AS_STORED):
        return
    if drafter in (None, NO_DRAFTER):
        why = "nothing is drafted"
    elif is_word(drafter):
        why = f"drafter {drafter} is none"
    elif not isinstance(drafter, str):
        why = f"{type(drafter).__name__} is a model object"
    elif is_head:
        why = f"{drafter} is a draft head"
    elif head_file(drafter) is None and is_gguf(located(drafter)):
        why = f"{drafter} is a GGUF file, whose weights stay as they are"
    else:
        return
    raise ForetokenError(
        f"quantise_drafter {kind} is for a drafter model named by folder, and {why}: leave it out, or draft with "
        f"{OWN}:{kind}."
    )


def is_word(drafter: object) -> bool:
    """Whether a `drafter` is None or a word such as "ngram" or "self", and no model, head or place of one."""
    return drafter in (None, *NO_MODELS) or own_kind(drafter) is not None


def usual_tree(kind: str, method: str) -> str:
    """Return the name of the default tree of a drafter of this kind under this method."""
    return KINDS[kind].tree or METHODS[method]


def check_recipe(**named: Any) -> None:
    """Refuse fields of a Recipe that cannot be; named: the fields, None where the user named nothing."""
    Recipe(**{name: value for name, value in named.items() if value is not None})
    if named.get("tree") == PLAIN:  # a Recipe accepts it, but a user may not name it: `read_tree` refuses it
        read_tree(PLAIN)


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
    """Refuse what `foretoken.load` would refuse, as far as that can be found out without importing torch.

    target, drafter, dtype, compile, quantise, quantise_drafter, suffix_store: as in `foretoken.load`, models by name.
    named: fields of a Recipe; None where the user named nothing.
    """
    check_recipe(**named)
    check_choice("dtype", dtype, DTYPES)
    check_choice("compile", compile, COMPILE)
    check_quantise(quantise, target)
    check_store(drafter, suffix_store)
    check_weights(located(target))
    _, drafter = in_a_row(drafter)
    check_quantise_drafter(quantise_drafter, drafter)
    if drafter is not None and not is_word(drafter):
        check_weights(drafter if head_file(drafter) is not None else located(drafter))


PLAINLY = Recipe()
