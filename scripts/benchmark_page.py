"""Measures the tables of docs/benchmarks.md again and writes them into the page.

    python scripts/benchmark_page.py             lists the tables, with the date and the commit of each
    python scripts/benchmark_page.py NAME ..     runs the commands of these and writes what they print
    python scripts/benchmark_page.py --all       all that were not measured at this commit

In the page a table stands between `<!-- measured: NAME -->` and `<!-- end -->`, below the commands that make it. The
last command gets `--markdown`; those that end in `&` are servers, and are ended after it. Further lines of the comment
choose what is shown: `tables:`, how titles begin; `columns:` and `rows:`, whole names; each with `|` between them.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import typer

from foretoken.cli.main import run
from foretoken.core import files
from foretoken.core.errors import ForetokenError
from foretoken.measure.machine import commit, num_cores
from foretoken.models.identity import cpu_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"<!-- measured: (\S+)(.*?)-->\n(.*?)<!-- end -->\n", re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```\n", re.DOTALL)
STAMP = re.compile(r"^_(\d{4}-\d\d-\d\d), commit ([0-9a-f]+\+?), .*_$", re.MULTILINE)
TABLE = re.compile(r"^#### (.*)\n\n((?:\|.*\n?)+)", re.MULTILINE)
SERVER_S, END_S = 300, 60  # in which a server must answer, and end
URL = re.compile(r"http://[\w.]+:\d+")


@dataclass(frozen=True)
class Block:
    """A measured place of the page.

    chosen: what is shown of the tables, by `tables`, `columns` and `rows`; what is not named is shown whole.
    shell: the text of its commands. date, commit: of the figures; None before they are measured.
    """

    name: str
    chosen: Mapping[str, list[str]]
    shell: str
    date: str | None
    commit: str | None


def commands_in(shell: str) -> list[str]:
    """The commands of a block of shell code, each in one line and without its comment."""
    lines = re.sub(r"\\\n\s*", "", shell).splitlines()
    return [line for line in (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines) if line]


def blocks(text: str) -> dict[str, Block]:
    """The measured places of a page, in its order.

    Raises ForetokenError where one has no commands, or two have one name.
    """
    found: dict[str, Block] = {}
    for name, chosen, inside in BLOCK.findall(text):
        shell, stamp = SHELL.search(inside), STAMP.search(inside)
        if shell is None or name in found:
            raise ForetokenError(f"The place {name} of {PAGE.name} needs commands in ```sh, and a name of its own.")
        named = dict(line.split(": ", 1) for line in chosen.strip().splitlines())
        parts = {key: [part.strip() for part in value.split("|")] for key, value in named.items()}
        found[name] = Block(name, parts, shell[1], *(stamp.groups() if stamp else (None, None)))
    return found


def selected(printed: str, chosen: Mapping[str, list[str]]) -> str:
    """The tables of a report in Markdown, cut to what was chosen, each with its title unless it is the only one.

    Raises ForetokenError where nothing is left, or something that was chosen is not there.
    """
    kept = [
        (title, [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.strip().splitlines()])
        for title, body in TABLE.findall(printed)
        if title.startswith(tuple(chosen.get("tables", [""])))
    ]
    if not kept:
        raise ForetokenError("The command printed no table that was chosen.")
    wanted = chosen.get("rows")
    there = {line[0] for _, (_, _, *lines) in kept for line in lines}
    for name in wanted or ():
        _place(name, sorted(there))
    parts = []
    for title, (head, _, *lines) in kept:
        columns = [_place(name, head) for name in chosen.get("columns", head)]
        rows = [line for line in lines if wanted is None or line[0] in wanted]
        first, *others = (f"| {' | '.join(row[i] for i in columns)} |\n" for row in (head, *rows))
        table = "".join([first, "|---" * len(columns) + "|\n", *others])
        parts.append(table if len(kept) == 1 else f"**{title}**\n\n{table}")
    return "\n".join(parts)


def _place(name: str, among: list[str]) -> int:
    if name not in among:
        raise ForetokenError(f"{name!r} was chosen and not printed: there are {', '.join(among)}.")
    return among.index(name)


def with_figures(text: str, block: Block, tables: str, day: str, commit: str, machine: str) -> str:
    """The page with these tables, and where they come from, in the block's place."""

    def place(found: re.Match[str]) -> str:
        if found[1] != block.name:
            return found[0]
        shell = SHELL.search(found[3])
        assert shell is not None
        stamp = f"_{day}, commit {commit}, {machine}._"
        return f"<!-- measured: {found[1]}{found[2]}-->\n{shell[0]}{stamp}\n\n{tables}<!-- end -->\n"

    return BLOCK.sub(place, text)


def printed_by(block: Block) -> str:
    """What the last of its commands prints, with --markdown; the others before it, and its servers beside it.

    Raises ForetokenError where one fails.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    *before, last = commands_in(block.shell)
    urls = list(dict.fromkeys(URL.findall(last)))
    if taken := [url for url in urls if _answers(url)]:
        raise ForetokenError(f"{taken[0]} answers before its server was started: end what runs there.")
    servers: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as ends:
        for command in before:
            if command.endswith("&"):
                servers[command] = _started(command.removesuffix("&"), environment)
                ends.callback(_end, servers[command])
            elif subprocess.run(shlex.split(command), cwd=ROOT, env=environment, stdout=sys.stderr).returncode:
                raise ForetokenError(f"{block.name}: {command} failed.")
        for url in urls:
            _await(url, servers)
        done = subprocess.run([*shlex.split(last), "--markdown"], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        if done.returncode:
            raise ForetokenError(f"{block.name}: {last} failed with exit code {done.returncode}.")
    return done.stdout.decode()


def _started(command: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(shlex.split(command), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ForetokenError(f"{command} cannot be started: {error.filename} is not on the path.") from error


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _await(url: str, servers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + SERVER_S
    while not _answers(url):
        if ended := [command for command, server in servers.items() if server.poll() is not None]:
            raise ForetokenError(f"{ended[0]} ended with exit code {servers[ended[0]].returncode}.")
        if time.monotonic() > until:
            raise ForetokenError(f"{url} did not list its models within {SERVER_S} s.")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=SERVER_S).is_success
    except httpx.TransportError:
        return False


def measured_code() -> str:
    """The commit that is measured, with + where the code differs from it.

    Raises ForetokenError outside of a checkout.
    """
    found = commit("src", "benchmarks")
    if found is None:
        raise ForetokenError("The tables name the commit that they are of: measure them in a checkout.")
    return found


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Tables to measure; none only lists them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not measured at this commit.")] = False,
) -> None:
    """Measure tables of docs/benchmarks.md again, by the commands above them, and write them into the page."""
    known = blocks(PAGE.read_text(encoding="utf-8"))
    if unknown := [name for name in names or () if name not in known]:
        raise ForetokenError(f"There is no table {unknown[0]}: choose among {', '.join(known)}.")
    if not (names or everything):
        for block in known.values():
            print(f"{block.name:24}{block.date or 'not measured'}  {block.commit or ''}")
        return
    machine = f"{cpu_name()}, {num_cores()} cores"
    here = measured_code()
    for name in names or [each.name for each in known.values() if each.commit != here]:
        print(f"{name} ..", file=sys.stderr)
        begin, now = time.monotonic(), measured_code()
        printed = printed_by(known[name])
        if measured_code() != now:
            raise ForetokenError(f"The code changed while {name} was measured: measure it again.")
        try:
            tables = selected(printed, known[name].chosen)
        except ForetokenError:
            print(printed, file=sys.stderr)  # it may have taken an hour
            raise
        text = with_figures(
            PAGE.read_text(encoding="utf-8"), known[name], tables, date.today().isoformat(), now, machine
        )
        files.write(PAGE, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(partial(app, standalone_mode=False))
