"""Every public function says what its arguments mean: once for all classes that offer the same method."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SRC = Path(__file__).resolve().parents[1] / "src" / "foretoken"
FILES = sorted(SRC.rglob("*.py"))
DANGLING = ("Of ", "That ", "By ", "As ", "The same", "Also ")  # a docstring begins with a sentence of its own


class Described(NamedTuple):
    """A public function. args: their names. said: its docstring, that of its class included for `__init__`."""

    name: str
    line: int
    args: tuple[str, ...]
    said: str
    of_class: bool

    @property
    def missing(self) -> list[str]:
        return [arg for arg in self.args if not re.search(rf"\b{arg}\b", self.said)]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def public_functions(file: Path) -> list[Described]:
    return list(_inside(parsed(file), None))


def _inside(node: ast.Module | ast.ClassDef, of: ast.ClassDef | None) -> Iterator[Described]:
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _inside(child, child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            special = child.name in ("__init__", "__call__")
            private = child.name.startswith("_") and not special
            command = any("command" in ast.unparse(each) for each in child.decorator_list)  # help texts say it
            overload = any(ast.unparse(each) == "overload" for each in child.decorator_list)
            if private or command or overload:
                continue
            given = child.args.posonlyargs + child.args.args + child.args.kwonlyargs
            args = tuple(arg.arg for arg in given if arg.arg not in ("self", "cls") and not arg.arg.startswith("_"))
            said = ast.get_docstring(child) or ""
            if special and of is not None:
                said += ast.get_docstring(of) or ""
            yield Described(child.name, child.lineno, args, said, of is not None)


def test_arguments_are_described() -> None:
    functions = [each for file in FILES for each in public_functions(file)]
    contracts = {(each.name, each.args) for each in functions if each.of_class and not each.missing}
    found = [
        (f"{file.relative_to(SRC)}:{each.line} {each.name}", each)
        for file in FILES
        for each in public_functions(file)
        if not (each.of_class and (each.name, each.args) in contracts)
    ]
    assert not [f"{place}: {', '.join(each.missing)}" for place, each in found if each.missing]
    assert not [f"{place}: no docstring" for place, each in found if not each.of_class and not each.said]


def test_docstrings_begin_with_a_sentence() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [(file, node) for file in FILES for node in ast.walk(parsed(file)) if isinstance(node, kinds)]
    said = [(file.relative_to(SRC), ast.get_docstring(node) or "") for file, node in nodes]
    assert not [f"{file}: {text.splitlines()[0]}" for file, text in said if text.startswith(DANGLING)]
