"""A file of prompts on Ray Data actors, each with an engine of its own.

A row's text depends on its prompt, the settings and its seed alone; its seed is the seed of the file plus the number of
the row. Only with method auto at a temperature above 0 it also depends on measured times. So a killed actor changes
nothing: Ray gives its rows to another one, which writes the same texts. A killed run is started again with the same
output file: rows that are in it are not done again. Each row has a fingerprint of the settings it was written with, so
that a run with other settings is refused.
"""

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from foretoken.cluster import need
from foretoken.core.errors import ForetokenError
from foretoken.core.files import append
from foretoken.version import __version__

if TYPE_CHECKING:  # not at run time, so that an output file of another run is refused before torch is imported
    from foretoken.engine import Engine, Prompt

Row = dict[str, Any]
ROWS = 8  # the most rows that an actor gets at once, per sequence that it decodes side by side
REFUSED = "refused"  # the key of a row that says why there are no others
BEGINNING = b'{"index": '  # with which every line of the output begins


def fingerprint(named: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return 16 hex digits that differ where the settings, or the version of foretoken, differ.

    named: the settings of the engine, by name.
    options: the arguments of `Engine.generate`.
    """
    settings = json.dumps([named, options, __version__], sort_keys=True, default=repr)
    return sha256(settings.encode()).hexdigest()[:16]


class Actor:
    """Continues rows with an engine of its own.

    load: returns a new engine; it is called in the actor's process.
    seed: the seed of row 0.
    options: the arguments of `Engine.generate`, without a seed.
    settings: the fingerprint of all settings, which is written into each row.
    """

    def __init__(self, load: "Callable[[], Engine]", seed: int, options: Mapping[str, Any], settings: str) -> None:
        self.load, self.seed, self.options, self.settings = load, seed, dict(options), settings

    @cached_property
    def engine(self) -> "Engine":
        """The engine, loaded when it is first used."""
        return self.load()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Continue rows, as Ray Data calls it.

        batch: {"row": rows as JSON texts}.
        Returns the same with texts added. Where the models or a prompt are refused there is one row {"refused": why}:
        an exception would reach the user as Ray's own, with its traceback.
        """
        rows: list[Row] = [json.loads(row) for row in batch["row"]]
        try:
            done = [row for run in runs(rows) for row in self._continued(run)]
        except ForetokenError as error:
            done = [{REFUSED: str(error)}]
        return {"row": [json.dumps(row) for row in done]}

    def _continued(self, rows: list[Row]) -> Iterator[Row]:
        """Yield each of some rows, which have consecutive numbers, with its text."""
        for row in rows:
            self.engine.encode(row["prompt"], f"Prompt {row['index'] + 1}")  # `generate` would count from here
        seed = self.seed + rows[0]["index"]
        results = self.engine.generate([row["prompt"] for row in rows], seed=seed, **self.options)
        assert isinstance(results, list)
        for row, result in zip(rows, results, strict=True):
            yield {
                **row,
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
                "seed": result.seed,
                "settings": self.settings,
            }


def runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in order, parted where their numbers are not consecutive.

    One call of the engine can only have consecutive seeds, and so consecutive rows.

    rows: each has its number as "index".
    """
    ordered = sorted(rows, key=lambda row: row["index"])
    parted = groupby(enumerate(ordered), lambda each: each[1]["index"] - each[0])
    return [[row for _, row in run] for _, run in parted]


def generate_on_ray(
    load: "Callable[[], Engine]",
    prompts: "Sequence[Prompt]",
    seed: int,
    options: Mapping[str, Any],
    out: Path,
    actors: int,
    max_batch: int,
    named: Mapping[str, Any],
    num_cpus: int = 1,
    num_gpus: int = 0,
) -> int:
    """Continue every prompt; when an engine is done with its part of them, append a line of JSON per prompt to `out`.

    load: returns a new engine; it is called once in every actor.
    prompts: texts or conversations.
    seed: the seed of the first prompt; prompt i has seed + i.
    options: the arguments of `Engine.generate`, without a seed.
    out: the output file; lines that it has already are kept, and their prompts not continued again.
    actors: number of actors.
    max_batch: the most sequences that each actor decodes side by side.
    named: the settings of the engine by name, such as its models and its tree.
    num_cpus, num_gpus: number of cores and of GPUs that an actor takes.
    Returns the number of prompts continued now. Raises ForetokenError where Ray is not installed, `out` is of another
    run or cannot be written, or an actor refuses its models or a prompt.
    """
    data, settings = need("ray.data"), fingerprint(named, options)
    with out.open("a", encoding="utf-8") as file:
        done = set[int]()
        if out.is_file():  # and no device, such as /dev/full, which one reads without end
            hold(file, out)
            done = finished(out, prompts, seed, settings)
        todo = [{"index": i, "prompt": prompt} for i, prompt in enumerate(prompts) if i not in done]
        if not todo:
            return 0
        parts = max(actors, -(-len(todo) // (ROWS * max_batch)))
        dataset = data.from_items([{"row": json.dumps(row)} for row in todo], override_num_blocks=parts).map_batches(
            Actor,
            fn_constructor_args=(load, seed, options, settings),
            # Ray starts an actor that died again, and gives it its rows again.
            compute=data.ActorPoolStrategy(size=actors),
            batch_size=None,  # one of the `parts`; with a number, Ray would join small parts for one actor
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
        for each in dataset.iter_rows():
            if why := json.loads(each["row"]).get(REFUSED):
                raise ForetokenError(why)
            append(out, each["row"] + "\n")
    return len(todo)


def hold(file: IO[str], out: Path) -> None:
    """Keep an output file for this run alone until it is closed. Raises ForetokenError where another run writes to it.

    file, out: the file, open for writing, and its path.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ForetokenError(f"Another run writes to {out}: wait for its end, or name another --out.") from error


def finished(out: Path, prompts: "Sequence[Prompt]", seed: int, settings: str) -> set[int]:
    """Return the numbers of the rows that an earlier run has finished; an incomplete last line is cut off the file.

    out: the output file.
    prompts: the prompts of this run.
    seed: the seed of the first prompt.
    settings: the fingerprint of all settings.
    Raises ForetokenError where a line is not of these prompts, this seed and these settings.
    """
    whole, newline, rest = out.read_bytes().rpartition(b"\n")
    found: set[int] = set()
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        try:
            row = json.loads(line)
            index = row["index"]
            same = row["prompt"] == prompts[index] and row["seed"] == seed + index
        except (ValueError, LookupError, TypeError):
            row, same, index = {}, False, -1
        if not same or index in found:
            raise ForetokenError(f"Line {number} of {out} is not of this run: name another --out, or remove it.")
        if row.get("settings") != settings:
            raise ForetokenError(
                f"Line {number} of {out} was written with other settings (models, tree, temperature or the like, or "
                "another version): give the same ones, or name another --out."
            )
        found.add(index)
    if not rest.startswith(BEGINNING[: len(rest)]):
        raise ForetokenError(f"The last line of {out} is not of this run: name another --out, or remove it.")
    if rest:
        with out.open("r+b") as file:
            file.truncate(len(whole) + len(newline))
    return found
