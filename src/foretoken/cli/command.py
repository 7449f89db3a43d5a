"""Makes a command from a function: its parameters are the options, and the lines of its docstring are their help.

    @command
    def vocab(target: str, drafter: str, /, *, text: str | None = None) -> None:
        '''Compare two vocabularies.

        target: Folder of the target.
        drafter: Folder of the drafter.
        text: Text file like what will be generated.
        '''

A parameter before `/` is an argument of the command line. Any other is an option, and a flag if it is a bool. A
parameter of a dataclass type stands for one option per field, with the help that its docstring, or that of the class
it inherits from, has for the field. `json_` and `markdown` need no line. `$trees` and the like in a help text stand for
the names in a registry.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, cleandoc, signature
from string import Template
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from foretoken.core.errors import ForetokenError
from foretoken.heads import HEADS
from foretoken.models.named import DRAFTING_KIND, QUANTISED
from foretoken.recipe import AUTO, SCHEMES, VOCABS
from foretoken.trees.forms import forms
from foretoken.verify import RULES

NAMES = {
    "trees": ", ".join(forms()),
    "rules": ", ".join(RULES),
    "laws": ", ".join(SCHEMES),
    "heads": ", ".join(HEADS),
    "vocabs": ", ".join([*VOCABS, AUTO]),
    "kinds": ", ".join(QUANTISED),
    "drafting": DRAFTING_KIND,
}
# The help of the options that choose a report's form, which many commands have.
FORMS = {"json_": "Print JSON instead of text.", "markdown": "Print Markdown instead of text."}


def command(function: Callable[..., None], shared: Mapping[str, str] = FORMS) -> Callable[..., None]:
    """Return `function` as typer takes it, with an option per parameter and per field of its dataclasses.

    shared: the help, by name, of parameters of which the function's docstring says nothing.
    """
    hints = get_type_hints(function, include_extras=True)
    about, own = _documented(function.__doc__)
    helps = {**shared, **own}
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for given in signature(function).parameters.values():
        kind: Any = hints[given.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[given.name] = kind
            of_fields, field_helps = get_type_hints(kind, include_extras=True), field_help(kind)
            for each in fields(kind):
                default = Parameter.empty if each.default is MISSING else each.default
                parameters.append(_parameter(each.name, of_fields[each.name], default, field_helps.get(each.name)))
        else:
            is_argument = given.kind is Parameter.POSITIONAL_ONLY
            parameters.append(_parameter(given.name, kind, given.default, helps.get(given.name), is_argument))
    words = [p.name for p in signature(function).parameters.values() if p.kind is Parameter.POSITIONAL_ONLY]

    def call(**values: Any) -> None:
        _check_process()
        if values.get("json_") and values.get("markdown"):
            raise ForetokenError("--json and --markdown are two forms of one report: leave one out.")
        for name, kind in groups.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind) if each.name in values})
        function(*[values.pop(name) for name in words if name in values], **values)

    call.__name__, call.__doc__ = function.__name__, about
    setattr(call, "__signature__", Signature(parameters))  # noqa: B010 (a type checker knows no such attribute)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _check_process() -> None:
    """Refuse a current folder or an environment in which libraries would end a command without a clear word."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ForetokenError("The current folder was removed: change to another one.") from None
    if _number("NUMBA_DISABLE_JIT", 0):
        raise ForetokenError("NUMBA_DISABLE_JIT is set, and Foretoken's loops run only as compiled code: unset it.")
    if (threads := _number("NUMBA_NUM_THREADS", 1)) < 1:
        raise ForetokenError(f"NUMBA_NUM_THREADS is {threads}: it must be at least 1; set it to that, or unset it.")


def _number(name: str, otherwise: int) -> int:
    """Return a number in the environment as numba reads it; otherwise: that where there is none."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError:  # numba says so, and goes on with its own
        return otherwise


def field_help(kind: type) -> dict[str, str]:
    """Return the help of each field of a dataclass, by the field's name.

    kind: the dataclass; where its own docstring lacks a field, its bases' docstrings are used.
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        found |= _documented(each.__doc__)[1]
    return found


def _parameter(name: str, kind: Any, default: Any, text: str | None, is_argument: bool = False) -> Parameter:
    """Return one parameter as typer takes it. kind: its type. text: its help. is_argument: whether it is no option."""
    if get_origin(kind) is not Annotated:
        written = f"--{name.rstrip('_').replace('_', '-')}"
        kind = Annotated[kind, typer.Argument(help=text) if is_argument else typer.Option(written, help=text)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _documented(text: str | None) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its first line `name: meaning`, and the meanings by name."""
    about, *rest = re.split(r"^(\w+): ", cleandoc(text or ""), flags=re.MULTILINE)
    meanings = (Template(" ".join(meaning.split())).safe_substitute(NAMES) for meaning in rest[1::2])
    return re.sub(r"(?<=\S)\n(?=\S)", " ", about.strip()), dict(zip(rest[::2], meanings, strict=True))
