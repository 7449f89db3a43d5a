"""Writes what is generated into the pages: tables of trees, rules, laws and drafters from the registries that the
commands read, and the reference from docstrings and help texts.

`python scripts/tables.py` rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->`; a test compares.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

import foretoken
from foretoken.cli.main import app, run
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.recipe import KINDS, LAWS, SCHEMES, VOCABS
from foretoken.serve.schema import ChatRequest, CompletionRequest, StreamOptions
from foretoken.trees.forms import forms
from foretoken.verify import RULES, VERIFIERS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "foretoken"
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


def python() -> str:
    """The Python interface: functions, then classes, each with its signature and docstring."""
    names = [name for name in foretoken.__all__ if not name.startswith("_")]
    functions, classes = (sorted(name for name in names if name.islower() is lower) for lower in (True, False))
    return "".join(_described(name, getattr(foretoken, name), 3) for name in [*functions, *classes])


def commands() -> str:
    """Every command with its options."""
    return "".join(_command(name, command) for name, command in _commands())


def files() -> str:
    """Every room of the package, the outermost layer first, with its files and what each is about."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers, text = settings["tool"]["importlinter"]["contracts"][0]["layers"], ""
    for name in re.findall(r"[a-z.]+", " ".join(layers)):
        room = PACKAGE.parent / name.replace(".", "/")
        if room.is_dir():
            inside = sorted(path for path in room.rglob("*.py") if path.name != "__init__.py")
            rows = ((f"[{path.relative_to(room)}]({_link(path)})", _about(path)) for path in inside)
            text += f"## {room.name}/\n{_about(room / '__init__.py')}\n\n{_table(('file', 'about'), rows)}\n"
        else:
            path = room.with_suffix(".py")
            text += f"## {path.name}\n[{_about(path)}]({_link(path)})\n\n"
    return text


def _about(module: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph, *_ = str(ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))).split("\n\n")
    return re.split(r"(?<! s\.)(?<=\.) (?=[A-Z])", " ".join(paragraph.split()))[0].replace("|", "\\|")


def _link(path: Path) -> str:
    return f"../{path.relative_to(ROOT)}"


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table for table in (trees, rules, laws, vocabularies, fields, python, commands, files)
}
PAGES = ("docs/trees-and-rules.md", "docs/drafters.md", "docs/serving.md", "docs/reference.md", "docs/source.md")


def filled(page: str) -> str:
    """The text of a page with all its tables as the registries have them."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |", "---|")


def _described(name: str, thing: Any, level: int) -> str:
    """The heading, signature and docstring of a function or class, and of what a class offers."""
    text = f"{'#' * level} {name}\n```text\n{_signature(name, thing)}{inspect.getdoc(thing)}\n```\n\n"
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and inspect.getdoc(value) and _is_method(value):
                text += _described(f"{name}.{member}", getattr(thing, member), level + 1)
    return text


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)


def _signature(name: str, thing: Any) -> str:
    """`name(parameters with their defaults)` and an empty line; nothing for an exception."""
    if isinstance(thing, type) and issubclass(thing, Exception):
        return ""
    shown: list[str] = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown and not any(p[0] == "*" for p in shown):
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{stars}{parameter.name}{_default(parameter.default)}")
    return f"{name}({', '.join(shown)})\n\n"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    return f"={value!r}" if isinstance(value, str | int | float | tuple | None) else "=..."


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of a group one by one."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        else:
            yield name, command


def _command(name: str, command: Any) -> str:
    rows = [
        (f"`{'`, `'.join(each.opts) if each.param_type_name == 'option' else each.metavar or each.name}`", _help(each))
        for each in command.params
    ]
    return f"### foretoken {name}\n{inspect.cleandoc(command.help)}\n\n{_table(('option', 'meaning'), rows)}\n"


def _help(parameter: Any) -> str:
    said = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    shows = isinstance(default, str | int | float) and not isinstance(default, bool) and "Default" not in said
    return f"{said} Default: {default}." if shows else said


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
    """Write all pages anew. Raises ForetokenError where the folder of the pages is not there."""
    if not (ROOT / "docs").is_dir():
        raise ForetokenError(f"There is no folder {ROOT / 'docs'}: run this script where it stands in a checkout.")
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(read_text(str(page), "the page")), encoding="utf-8")


if __name__ == "__main__":
    run(main)
