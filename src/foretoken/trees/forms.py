"""The names of trees, such as "chain:4". Reading them needs no torch, so the command line refuses a bad one at once."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.limits import MAX_NODES, shown

Read = tuple[str, tuple[Any, ...]]  # the kind of tree, and the arguments of the function or class that makes it


def read_tree(spec: str) -> Read:
    """Return the kind of tree and its arguments; a file that the name refers to is read.

    spec: the name as users write it, such as "chain:4", "kary:2x4" or "list:shape.json".

    Raises ForetokenError where the name or the file is not understood, or the tree is too large.
    """
    kind, colon, rest = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if kind not in TREES or not colon:
        known = ", ".join(form.write for form in TREES.values())
        raise ForetokenError(f"Unknown tree {shown(spec)}: choose {known}; docs/trees-and-rules.md says what each is.")
    return kind, TREES[kind].read(rest)


def forms() -> dict[str, str]:
    """Return {what may be written for a tree: what it means} for all kinds of trees."""
    return {form.write: form.meaning for form in TREES.values()}


def check_parents(parents: Sequence[int]) -> None:
    """Raise ForetokenError where `parents` is no parent list: parents[0] = -1 (the root), 0 <= parents[i] < i.

    There may be at most MAX_NODES nodes besides the root.
    """
    if not parents or parents[0] != -1:
        raise ForetokenError("A tree's parent list must start with -1, the root.")
    check_size(len(parents) - 1)
    for i, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < i:
            raise ForetokenError(f"Tree node {i} has parent {parent}: a parent must come before its child.")


def check_size(nodes: int) -> None:
    """Raise ForetokenError where `nodes`, the number of nodes besides the root, is above MAX_NODES."""
    if nodes > MAX_NODES:
        raise _too_large(nodes)


def _too_large(nodes: int | str) -> ForetokenError:
    return ForetokenError(f"A tree of {nodes} nodes has more than {MAX_NODES}: make it smaller.")


def _chain(spec: str) -> tuple[int, float]:
    depth, floor = _floor(spec, "chain:D")
    return _size(depth, "chain:D"), floor


def _kary(spec: str) -> tuple[int, int, float]:
    children, cross, rest = spec.partition("x")
    if not cross:
        raise ForetokenError(f"Tree kary:{spec} is incomplete: write kary:KxD, e.g. kary:2x4.")
    depth, floor = _floor(rest, "kary:KxD")
    k, levels = _size(children, "kary:KxD"), _size(depth, "kary:KxD")
    nodes = 0
    for level in range(1, levels + 1):
        nodes += k**level
        if nodes > MAX_NODES:
            raise ForetokenError(f"Tree kary:{k}x{levels} has more than {MAX_NODES} nodes: make it smaller.")
    return k, levels, floor


def _delayed(spec: str) -> tuple[int, int, int]:
    form = "delayed:D+KxL"
    trunk, plus, rest = spec.partition("+")
    branches, cross, length = rest.partition("x")
    if not (plus and cross):
        raise ForetokenError(f"Tree delayed:{spec} is incomplete: write {form}, e.g. delayed:4+3x4.")
    depth = 0 if trunk == "0" else _size(trunk, form)
    k, levels = _size(branches, form), _size(length, form)
    check_size(depth + k * levels)
    return depth, k, levels


def _sized(form: str) -> Callable[[str], tuple[int]]:
    return lambda spec: (_size(spec, form),)


def _sequoia(spec: str) -> tuple[list[float], int]:
    number, at, path = spec.partition("@")
    if not at:
        raise ForetokenError(f"Tree sequoia:{spec} is incomplete: write sequoia:N@FILE, FILE with measured acceptance.")
    nodes = _size(number, "sequoia:N@FILE")
    return read_acceptance(path), nodes


def _list(path: str) -> tuple[tuple[int, ...]]:
    """Return the parent list in a JSON file, e.g. [-1, 0, 0, 1]."""
    content = _content(path, "tree file")
    try:
        parents = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ForetokenError(
            f"Tree file {path} is not JSON: it must hold a parent list such as [-1, 0, 0, 1]."
        ) from error
    if not isinstance(parents, list) or not all(type(x) is int for x in parents):
        raise ForetokenError(f"Tree file {path} must hold a list of integers such as [-1, 0, 0, 1].")
    check_parents(parents)
    return (tuple(parents),)


def _content(path: str, what: str) -> str:
    """Return the text in a file; path, what: as in `read_text`. A tree's file is read whenever the tree is made."""
    piped = False
    with suppress(OSError, ValueError):  # of a path that cannot be, which `read_text` refuses
        piped = Path(path).is_fifo()
    if piped:
        raise ForetokenError(f"The {what} {path} is a pipe, which can be read only once: write it to a file first.")
    return read_text(path, what)


def with_absolute_file(spec: str) -> str:
    """Return the name of a tree for a process that runs in another folder: a file in it has its absolute path.

    spec: the name as users write it.
    """
    kind, _, rest = spec.partition(":")
    before, at, file = rest.partition("@") if kind == "sequoia" else ("", "", rest)
    return f"{kind}:{before}{at}{Path(file).absolute()}" if kind in ("sequoia", "list") else spec


def read_acceptance(path: str) -> list[float]:
    """Return the acceptance vector in a JSON file {"acceptance": [0.68, 0.11, ..]}, whose other keys are not read.

    path: the path of the file.

    Raises ForetokenError where the file cannot be read or holds no such vector.
    """
    content = _content(path, "acceptance file")
    try:
        found = json.loads(content)["acceptance"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ForetokenError(
            f'Acceptance file {path} must hold JSON such as {{"acceptance": [0.68, 0.11]}}.'
        ) from error
    if not isinstance(found, list) or not all(isinstance(a, int | float) for a in found):
        raise ForetokenError(f"Acceptance file {path} must hold a list of probabilities under acceptance.")
    return check_acceptance(found)


def check_acceptance(acceptance: Sequence[float]) -> list[float]:
    """Return an acceptance vector as floats.

    acceptance: for each child of a node, in draw order, the probability that it is the accepted one [children].

    Raises ForetokenError where these are no such probabilities: empty, outside [0, 1], or of a sum above 1.
    """
    if not acceptance or not all(0 <= a <= 1 for a in acceptance) or math.fsum(acceptance) > 1 + 1e-6:
        raise ForetokenError(f"An acceptance vector has probabilities that sum to at most 1, not {acceptance}.")
    return [float(a) for a in acceptance]


def _size(text: str, form: str) -> int:
    """Return the number that `text` stands for in a tree's name of the form `form`, from 1 to MAX_NODES."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit() and digits):
        raise ForetokenError(f"In tree {form} the numbers must be positive integers, not {text!r}.")
    if len(digits) > len(str(MAX_NODES)) or int(digits) > MAX_NODES:
        raise _too_large(f"{digits:.25}")
    return int(digits)


def _floor(spec: str, form: str) -> tuple[str, float]:
    """Split "D@C" and return (what stands before the @, the number C behind it); C is 0 where there is no @."""
    rest, at, text = spec.partition("@")
    if not at:
        return rest, 0.0
    try:
        floor = float(text)
    except ValueError:
        floor = math.nan
    if not 0 < floor <= 1:
        raise ForetokenError(f"In tree {form}@C the confidence C must be above 0 and at most 1, not {text!r}.")
    return rest, floor


class Form(NamedTuple):
    """How trees of one kind are named.

    write: what users write, with letters for its numbers.
    meaning: what it means, in the tables of the documentation.
    read: what reads the part of the name after the colon, and returns the arguments of what makes the tree.
    """

    write: str
    meaning: str
    read: Callable[[str], tuple[Any, ...]]


TREES = {
    "chain": Form("chain:D or chain:D@C", "a path of D draft tokens; @C ends it where its q falls below C", _chain),
    "kary": Form("kary:KxD or kary:KxD@C", "K children per node down to depth D; @C as above", _kary),
    "delayed": Form(
        "delayed:D+KxL", "a path of D draft tokens, then K paths of L each behind it; D may be 0", _delayed
    ),
    "budget": Form(
        "budget:N", "sampled children where they pay most, N nodes expected over a text", _sized("budget:N")
    ),
    "dynamic": Form(
        "dynamic:N", "the N likeliest nodes of a tree grown by the likeliest (EAGLE-2)", _sized("dynamic:N")
    ),
    "sequoia": Form("sequoia:N@FILE", "the best static tree of N nodes for the acceptance in a JSON file", _sequoia),
    "opt-tree": Form("opt-tree:N", "as dynamic:N, as deep as pays (OPT-Tree)", _sized("opt-tree:N")),
    "product": Form(
        "product:N",
        "the N likeliest nodes of a head that drafts levels side by side, full tree attention done exactly",
        _sized("product:N"),
    ),
    "list": Form("list:FILE", "the parent list in a JSON file", _list),
}
