"""A batch file on real Ray actors: every row once, with the text of a single engine, whoever is killed meanwhile."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foretoken
from foretoken import ForetokenError
from foretoken.cluster import batch
from foretoken.cluster.batch import Actor, fingerprint, finished, generate_on_ray, hold, runs

OPTIONS = {"max_new_tokens": 24, "temperature": 0.9}
PROMPTS = [f"line {i}:" for i in range(64)]
NAMED = {"drafter": "drafter", "tree": "chain:3"}
SETTINGS = fingerprint(NAMED, OPTIONS)


def load(folder: str, pids: str | None = None) -> foretoken.Engine:
    """pids: folder in which every process that loads an engine leaves its number."""
    if pids is not None:
        (Path(pids) / str(os.getpid())).touch()
    return foretoken.load(f"{folder}/target", drafter=f"{folder}/drafter", tree="chain:3", device="cpu")


def wanted(demo: Path, seed: int) -> dict[int, str]:
    """The text of each row."""
    return dict(enumerate(result.text for result in load(str(demo)).generate(PROMPTS, seed=seed, **OPTIONS)))


def texts(lines: list[str]) -> dict[int, str]:
    return {row["index"]: row["text"] for row in map(json.loads, lines)}


def test_rows_are_parted_where_seeds_are_not_consecutive():
    rows = [{"index": i} for i in (7, 2, 3, 5, 6, 9)]
    assert [[row["index"] for row in run] for run in runs(rows)] == [[2, 3], [5, 6, 7], [9]]


def test_a_rows_text_is_its_own_whatever_the_rows_beside_it(demo):
    actor = Actor(partial(load, str(demo)), 11, OPTIONS, SETTINGS)
    rows = {"row": [json.dumps({"index": i, "prompt": PROMPTS[i]}) for i in (40, 3, 4, 41, 20)]}
    lines, want = actor(rows)["row"], wanted(demo, 11)
    assert texts(lines) == {i: want[i] for i in (3, 4, 20, 40, 41)}
    got = [json.loads(line) for line in lines]
    assert [row["seed"] for row in got] == [11 + row["index"] for row in got]
    assert {row["settings"] for row in got} == {SETTINGS}


class FakeData:
    """As much of Ray Data as a batch uses: one actor, in this process, which gets all rows at once."""

    def from_items(self, items: list[dict[str, str]], **_: Any) -> "FakeData":
        self.rows = [item["row"] for item in items]
        return self

    def map_batches(self, actor: Any, fn_constructor_args: tuple[Any, ...], **_: Any) -> "FakeData":
        self.rows = actor(*fn_constructor_args)({"row": self.rows})["row"]
        return self

    def iter_rows(self) -> Iterator[dict[str, str]]:
        return iter([{"row": row} for row in self.rows])

    ActorPoolStrategy = SimpleNamespace


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[str], Path, str], None]:
    """Asserts that a batch is refused, with these words."""
    monkeypatch.setattr(batch, "need", lambda _: FakeData())

    def refused(models: Path, prompts: list[str], out: Path, says: str) -> None:
        with pytest.raises(ForetokenError, match=says):
            generate_on_ray(partial(load, str(models)), prompts, 5, OPTIONS, out, 1, 1, NAMED)

    return refused


def test_a_refused_prompt_is_one_sentence_with_its_number_in_the_file(demo, tmp_path, refused):
    out, prompts = tmp_path / "out.jsonl", [*PROMPTS[:2], "long " * 2000, "short"]
    refused(demo, prompts, out, r"^Prompt 3 has \d+ tokens, and the context of .* shorten it\.$")
    assert out.read_text() == ""


def test_models_that_an_actor_cannot_load_are_one_sentence(tmp_path, refused):
    refused(tmp_path, PROMPTS, tmp_path / "out.jsonl", f"{tmp_path}/target")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named_and_a_device_is_not_read(demo, refused):
    refused(demo, PROMPTS[:2], Path("/dev/full"), r"^Cannot write /dev/full: No space left on device\.$")


def test_two_runs_do_not_write_one_file(tmp_path):
    out = tmp_path / "out.jsonl"
    with out.open("a") as first, out.open("a") as second:
        hold(first, out)
        with pytest.raises(ForetokenError, match=r"Another run writes to .*out.jsonl"):
            hold(second, out)
    with out.open("a") as later:
        hold(later, out)


def line_of(index: int, seed: int, settings: str) -> str:
    return json.dumps({"index": index, "prompt": PROMPTS[index], "text": "x", "seed": seed, "settings": settings})


def test_what_an_earlier_run_wrote_is_kept_but_for_half_a_line(tmp_path):
    out = tmp_path / "out.jsonl"
    line = line_of(3, 8, SETTINGS)
    out.write_text(f'{line}\n{{"index": 4, "pro')
    assert finished(out, PROMPTS, 5, SETTINGS) == {3}
    assert out.read_text() == line + "\n"
    out.write_text('{"index"')
    assert finished(out, PROMPTS, 5, SETTINGS) == set()
    assert out.read_text() == ""
    out.write_text("somebody's notes")
    with pytest.raises(ForetokenError, match=r"The last line of .* is not of this run"):
        finished(out, PROMPTS, 5, SETTINGS)
    assert out.read_text() == "somebody's notes"
    others = line.replace('"seed": 8', '"seed": 9'), line.replace("line 3", "line 4")
    for bad in (*others, "7", "{}", f"{line}\n{line}", ""):
        out.write_text(bad + "\n")
        with pytest.raises(ForetokenError, match=r"Line [12] of .* is not of this run"):
            finished(out, PROMPTS, 5, SETTINGS)


@pytest.mark.parametrize(
    ("named", "options"),
    [
        (NAMED | {"drafter": "ngram"}, OPTIONS),
        (NAMED | {"tree": "chain:4"}, OPTIONS),
        (NAMED, OPTIONS | {"temperature": 0.8}),
        (NAMED, OPTIONS | {"stop": ("x",)}),
        (NAMED, {"max_new_tokens": 24}),
    ],
)
def test_what_other_settings_wrote_is_refused(tmp_path, named, options):
    other = fingerprint(named, options)
    assert other != SETTINGS == fingerprint(dict(reversed(NAMED.items())), dict(OPTIONS))
    out = tmp_path / "out.jsonl"
    before = "".join(line_of(i, 5 + i, other) + "\n" for i in (0, 1)) + '{"index": 2, "pr'
    out.write_text(before)
    with pytest.raises(ForetokenError, match=r"Line 1 of .* was written with other settings"):
        finished(out, PROMPTS, 5, SETTINGS)
    assert out.read_text() == before
    assert finished(out, PROMPTS, 5, other) == {0, 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_killed_actor_changes_nothing(cluster, demo, tmp_path):
    want, out, pids = wanted(demo, 5), tmp_path / "out.jsonl", tmp_path / "pids"
    pids.mkdir()
    loading = partial(load, str(demo), str(pids))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate_on_ray, loading, PROMPTS, 5, OPTIONS, out, 2, 1, NAMED)
        while not (out.exists() and out.stat().st_size):
            assert not running.done()
        os.kill(int(min(pids.iterdir()).name), signal.SIGKILL)  # with other rows under way
        running.result(240)
    lines = out.read_text().splitlines()
    assert (len(lines), texts(lines)) == (len(PROMPTS), want)
    out.write_text("\n".join(lines[:20]) + '\n{"ind')  # as a killed run leaves it
    assert generate_on_ray(loading, PROMPTS, 5, OPTIONS, out, 2, 1, NAMED) == len(PROMPTS) - 20
    assert texts(out.read_text().splitlines()) == want


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_batch_by_the_command(cluster, demo, run, tmp_path):
    file, out = tmp_path / "batch.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS[:6]))
    models = "--target", demo / "target", "--drafter", demo / "drafter", "--tree", "chain:3"
    line = "generate", "--batch-file", file, "--ray", 2, "--out", out, "--seed", 5, *models
    sampled = "--temperature", 0.9, "--max-new-tokens", 24
    code, _, err = run(*line, *sampled)
    assert (code, err.splitlines()[-1]) == (0, f"6 texts written to {out}, which has all 6"), err
    written, want = out.read_text(), wanted(demo, 5)
    assert texts(written.splitlines()) == {i: want[i] for i in range(6)}
    for other in ("--drafter", "ngram"), ("--tree", "chain:4"), ("--temperature", 0.8), ("--top-k", 7):
        code, _, err = run(*line, *sampled, *other)
        assert (code, len(err.splitlines())) == (2, 1), err
        assert "was written with other settings" in err
    assert run(*line, *sampled)[0] == 0
    assert out.read_text() == written
