"""What may be named on the command line besides models, read without torch: trees, rules, laws, ways to draft.

Every name stands here or in the table that it is taken from, and nowhere else; `names`, `build` and `drafters` turn
names into things.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.core.lazy import Lazy
from foretoken.core.limits import check_probability
from foretoken.models.named import check_compile, check_dtype, head_file, located
from foretoken.trees.grammar import read_tree
from foretoken.verify import VERIFIERS

if TYPE_CHECKING:
    from foretoken.core.verifier import LawFamily

AUTO = "auto"
FIXED = "fixed"
METHODS = {FIXED: "chain:5", AUTO: "chain:12"}  # how the depth of each step is chosen, and the tree by default
LAWS: "Lazy[LawFamily]" = Lazy(
    {
        "iid": "core.laws:IID",
        "without_replacement": "core.laws:WithoutReplacement",
        "hub": "core.laws:Hub",
        "opaque": "core.laws:Opaque",
    }
)
# (model, translation, tree policy, law family) -> a drafter with another vocabulary
VOCABS: Lazy[Any] = Lazy(
    {
        "tli": "draft.tli:tli",
        "slem": "draft.slem:SLEMDrafter",
        "slrs": "draft.slrs:SLRSDrafter",
        "union": "draft.slrs:union",
    }
)
NGRAM = "ngram"  # the drafter that looks the prompt up
NO_DRAFTER = "none"


def check_law(name: str) -> str:
    """The law's own spelling."""
    name = name.replace("-", "_")
    _check_known("law", name, LAWS)
    return name


def check_verifier(name: str) -> None:
    _check_known("verifier", name, VERIFIERS)


def check_method(name: str) -> None:
    _check_known("method", name, METHODS)


def check_vocab(name: str) -> None:
    _check_known("vocab", name, [*VOCABS, AUTO])


def check_engine(
    target: str,
    drafter: str | None = None,
    method: str | None = None,
    tree: str | None = None,
    verifier: str | None = None,
    law: str | None = None,
    dtype: str | None = None,
    vocab: str | None = None,
    compile: str = AUTO,
    draft_probability: float | None = None,
) -> None:
    """Refuse what `foretoken.load` would refuse anyway, where that can be told before torch is imported."""
    for value, check in (
        (method, check_method),
        (tree, read_tree),
        (verifier, check_verifier),
        (law, check_law),
        (dtype, check_dtype),
        (vocab, check_vocab),
        (compile, check_compile),
    ):
        if value is not None:
            check(value)
    check_probability(draft_probability)
    located(target)
    if drafter not in (None, NGRAM, NO_DRAFTER) and head_file(drafter) is None:
        located(drafter)


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ForetokenError(f"Unknown {what} {name}: choose one of {', '.join(known)}.")
