"""A file of prompts on Ray Data actors, each with an engine of its own.

A row's text depends on its prompt, the settings and its seed alone, which is the file's seed plus the row's number; but
for method auto at a temperature above 0, where it also depends on measured times. So a killed actor changes nothing:
Ray gives its rows to another one, which writes the same texts. A killed run is started again with the same output file:
rows that are in it are not done again. Each row tells by a fingerprint which settings it was written with, so that a
run with others is refused.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cluster import need
from foretoken.core.errors import ForetokenError
from foretoken.version import __version__

if TYPE_CHECKING:  # what an earlier run wrote is refused before torch is imported
    from foretoken.engine import Engine, Prompt

Row = dict[str, Any]
ROWS = 8  # rows that an actor is given at once at most, for each sequence that it decodes side by side
BEGINNING = b'{"index": '  # of every line


def fingerprint(named: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A word that differs where settings, or the version, do. named: of the engine. options: of `Engine.generate`."""
    settings = json.dumps([named, options, __version__], sort_keys=True, default=repr)
    return sha256(settings.encode()).hexdigest()[:16]


class Actor:
    """Continues rows with an engine of its own.

    load: makes the engine, in the actor's process. seed: of row 0. options: of `Engine.generate`, without a seed.
    settings: their fingerprint.
    """

    def __init__(self, load: "Callable[[], Engine]", seed: int, options: Mapping[str, Any], settings: str) -> None:
        self.engine, self.seed, self.options, self.settings = load(), seed, dict(options), settings

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """batch: {"row": JSON texts of rows}, as Ray Data gives it. Returns the same with their texts in them."""
        rows: list[Row] = [json.loads(row) for row in batch["row"]]
        return {"row": [json.dumps(row) for run in runs(rows) for row in self._continued(run)]}

    def _continued(self, rows: list[Row]) -> Iterator[Row]:
        """Rows with consecutive numbers, each with its text."""
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
    """The rows in order, parted where their numbers are not consecutive: a call of the engine has consecutive seeds."""
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
    """Continue every prompt, and append a line of JSON to `out` as soon as each is done.

    load: makes an engine; it is called once in every actor. prompts: texts or conversations. seed: of the first prompt;
    prompt i has seed + i. options: of `Engine.generate`. out: lines that it has already are kept and not done again.
    actors: how many work. max_batch: sequences that each decodes side by side. named: the settings of the engine, such
    as the names of its models and its tree. num_cpus, num_gpus: cores and GPUs that an actor takes.

    Returns how many were done now. Raises ForetokenError where Ray is not installed, or `out` is of another run.
    """
    data, settings = need("ray.data"), fingerprint(named, options)
    done = finished(out, prompts, seed, settings)
    todo = [{"index": i, "prompt": prompt} for i, prompt in enumerate(prompts) if i not in done]
    if not todo:
        return 0
    parts = max(actors, -(-len(todo) // (ROWS * max_batch)))
    dataset = data.from_items([{"row": json.dumps(row)} for row in todo], override_num_blocks=parts).map_batches(
        Actor,
        fn_constructor_args=(load, seed, options, settings),
        compute=data.ActorPoolStrategy(size=actors),  # Ray starts an actor that died again, and gives it its rows again
        batch_size=None,  # one of the parts: with a number, Ray puts small parts together for one actor
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    with out.open("a", encoding="utf-8") as file:
        for each in dataset.iter_rows():
            file.write(each["row"] + "\n")
            file.flush()
    return len(todo)


def finished(out: Path, prompts: "Sequence[Prompt]", seed: int, settings: str) -> set[int]:
    """The numbers of the rows in the output of an earlier run; what that run wrote of a last line is cut off.

    Raises ForetokenError where a line is not of these prompts, this seed and these settings.
    """
    if not out.exists():
        return set()
    whole, _, rest = out.read_bytes().rpartition(b"\n")
    found: set[int] = set()
    for number, line in enumerate(whole.splitlines(), start=1):
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
            file.truncate(len(whole) + 1 if whole else 0)
    return found
