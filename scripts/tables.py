"""Writes the tables of trees, rules, laws and drafters into the pages, from the registries that the commands read.

`python scripts/tables.py` rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->`; a test compares.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from foretoken.recipe import KINDS, LAWS, SCHEMES, VOCABS
from foretoken.serve.schema import ChatRequest, CompletionRequest, StreamOptions
from foretoken.trees.grammar import forms
from foretoken.verify import RULES, VERIFIERS

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def trees() -> str:
    """Every form of a tree, with what it means."""
    return _table(("`--tree`", "what is drafted"), ((_code_each(form), about) for form, about in forms().items()))


def rules() -> str:
    """Every rule, with the laws that it is lossless for."""
    return _table(
        ("`--verifier`", "laws", "what it does"),
        ((f"`{name}`", ", ".join(_laws(name)), about) for name, (_, about) in RULES.items()),
    )


def laws() -> str:
    """Every law."""
    return _table(("`--law`", "children"), ((f"`{name}`", about) for name, (_, about) in SCHEMES.items()))


def vocabularies() -> str:
    """Every method for a drafter with another vocabulary."""
    return _table(
        ("`--vocab`", "drafts", "usual verifier"),
        ((f"`{name}`", KINDS[name].about, _rule(KINDS[name].rule)) for name in VOCABS),
    )


def fields() -> str:
    """Every field of a request for texts, and where it may stand."""
    chat, completion = ChatRequest.model_fields, CompletionRequest.model_fields
    rows: list[tuple[str, ...]] = []
    for name, field in {**chat, **completion}.items():
        of_chat, of_completion = chat.get(name), completion.get(name)
        if of_chat and of_completion and of_chat.description != of_completion.description:
            rows.append((f"`{name}`", "chat", str(of_chat.description)))
            rows.append((f"`{name}`", "completions", str(of_completion.description)))
        else:
            where = "both" if of_chat and of_completion else "chat" if of_chat else "completions"
            rows.append((f"`{name}`", where, str(field.description)))
    for name, field in StreamOptions.model_fields.items():
        rows.append((f"`stream_options.{name}`", "both", str(field.description)))
    return _table(("field", "of", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in (trees, rules, laws, vocabularies, fields)}
PAGES = ("docs/trees-and-rules.md", "docs/drafters.md", "docs/serving.md")


def filled(page: str) -> str:
    """The text of a page with all its tables as the registries have them."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")


def _laws(rule: str) -> list[str]:
    families = VERIFIERS[rule].laws
    if all(name in families for name in (LAWS[name] for name in LAWS)):
        return ["every law"]
    return [f"`{name}`" for name in LAWS if LAWS[name] in families]


def _rule(name: str | None) -> str:
    return "that of the tree" if name is None else f"`{name}`"


def _code_each(form: str) -> str:
    return re.sub(r"\S+:\S+", r"`\g<0>`", form)


def main() -> None:
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
