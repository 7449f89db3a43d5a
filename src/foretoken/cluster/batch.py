"""A file of prompts on Ray Data actors, each with an engine of its own.

A row's text depends on its prompt, the settings and its seed alone, which is the file's seed plus the row's number; but
for method auto at a temperature above 0, where it also depends on measured times. So a killed actor changes nothing:
Ray gives its rows to another one, which writes the same texts. A killed run is started again with the same output file:
rows that are in it are not done again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.engine import Engine, Prompt

Row = dict[str, Any]
ROWS = 8  # rows that an actor is given at once, for each sequence that it decodes side by side


class Actor:
    """Continues rows with an engine of its own.

    load: makes the engine, in the actor's process. seed: of row 0. options: of `Engine.generate`, without a seed.
    """

    def __init__(self, load: Callable[[], Engine], seed: int, options: Mapping[str, Any]) -> None:
        self.engine, self.seed, self.options = load(), seed, dict(options)

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
            }


def runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in order, parted where their numbers are not consecutive: a call of the engine has consecutive seeds."""
    ordered = sorted(rows, key=lambda row: row["index"])
    parted = groupby(enumerate(ordered), lambda each: each[1]["index"] - each[0])
    return [[row for _, row in run] for _, run in parted]


def generate_on_ray(
    load: Callable[[], Engine],
    prompts: Sequence[Prompt],
    seed: int,
    options: Mapping[str, Any],
    out: Path,
    actors: int,
    max_batch: int,
) -> int:
    """Continue every prompt, and append a line of JSON to `out` as soon as each is done.

    load: makes an engine; it is called once in every actor. prompts: texts or conversations. seed: of the first prompt;
    prompt i has seed + i. options: of `Engine.generate`. out: lines that it has already are kept and not done again.
    actors: how many work. max_batch: sequences that each decodes side by side.

    Returns how many were done now. Raises ForetokenError where Ray is not installed, or `out` is of another run.
    """
    try:
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ForetokenError("Ray is not installed: pip install -e '.[cluster]'.") from error
    todo = [{"index": i, "prompt": prompt} for i, prompt in enumerate(prompts)]
    done = finished(out, prompts, seed)
    todo = [row for row in todo if row["index"] not in done]
    if not todo:
        return 0
    size = ROWS * max_batch
    dataset = ray.data.from_items(
        [{"row": json.dumps(row)} for row in todo], override_num_blocks=max(actors, -(-len(todo) // size))
    ).map_batches(
        Actor,
        fn_constructor_args=(load, seed, options),
        concurrency=actors,
        batch_size=size,
        num_cpus=1,
        max_restarts=-1,
        max_task_retries=-1,
    )
    with out.open("a", encoding="utf-8") as file:
        for each in dataset.iter_rows():
            file.write(each["row"] + "\n")
            file.flush()
    return len(todo)


def finished(out: Path, prompts: Sequence[Prompt], seed: int) -> set[int]:
    """The numbers of the rows in the output of an earlier run; what that run wrote of a last line is cut off.

    Raises ForetokenError where a line is not of these prompts and this seed.
    """
    if not out.exists():
        return set()
    whole, _, rest = out.read_bytes().rpartition(b"\n")
    if rest:
        with out.open("r+b") as file:
            file.truncate(len(whole) + 1 if whole else 0)
    found: set[int] = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            index = row["index"]
            same = row["prompt"] == prompts[index] and row["seed"] == seed + index
        except (ValueError, LookupError, TypeError):
            same, index = False, -1
        if not same or index in found:
            raise ForetokenError(f"Line {number} of {out} is not of this run: name another --out, or remove it.")
        found.add(index)
    return found
