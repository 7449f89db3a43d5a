"""Texts of earlier requests in a file: kept from process to process, bounded, and refused where it is none of ours."""

import atexit
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from safetensors.numpy import save, save_file

import foretoken
import tiny
from foretoken.core.errors import ForetokenError
from foretoken.draft import store_file
from foretoken.draft.store_file import FORMAT, KeptStore, StoreFileWarning, read
from test_suffixes import from_store

LOAD = """
import sys, foretoken
engine = foretoken.load(sys.argv[1], drafter=sys.argv[2], suffix_store=sys.argv[3])
result = engine.generate("def f(x):", max_new_tokens=40, temperature=0.0)
print(result.stats.num_target_forwards, *result.token_ids)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.save(tiny.llama(0, hidden=64), tmp_path_factory.mktemp("store") / "target")


@pytest.mark.long
def test_a_process_begins_with_what_the_one_before_it_wrote(folder, tmp_path):
    """The same greedy text in fewer steps; the file is the same for a lookup alone and for one before a model."""
    command = [sys.executable, "-c", LOAD, folder, "suffix", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps, *ids = map(int, done.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    for drafter in ("suffix", "suffix+self"):
        engine = foretoken.load(folder, drafter=drafter, suffix_store=tmp_path / "store")
        atexit.unregister(engine.source.store.save)
        again = engine.generate("def f(x):", max_new_tokens=40, temperature=0.0)
        assert again.token_ids == ids
        assert drafter == "suffix+self" or again.stats.num_target_forwards < steps


def test_a_file_has_the_latest_texts_in_order_and_no_more_than_the_capacity(tmp_path):
    path = str(tmp_path / "store")
    store = KeptStore(path, 5000, 256)
    for first in range(0, 3000, 10):
        store.add(range(first, first + 10))
    store.save()
    tokens = read(path, 5000)
    assert len(tokens) == 256
    assert tokens[-11:].tolist() == [*range(2990, 3000), -1]
    again = KeptStore(path, 5000, 256)
    assert from_store(again, [2990, 2991, 2992, 2993]) == [*range(2994, 3000)]
    assert from_store(again, [0, 1, 2, 3]) == []
    smaller = KeptStore(path, 5000, 64)
    assert len(smaller) == 64
    assert from_store(smaller, [2990, 2991, 2992, 2993]) == [*range(2994, 3000)]


def test_a_store_is_written_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(store_file.time, "monotonic", lambda: now)
    now = 0.0
    store = KeptStore(str(tmp_path / "store"), 100)
    store.add([1, 2, 3])
    assert not (tmp_path / "store").exists()
    now = store_file.EVERY
    store.add([4, 5])
    assert read(str(tmp_path / "store"), 100).tolist() == [1, 2, 3, -1, 4, 5, -1]


def test_what_other_processes_wrote_meanwhile_stays(tmp_path):
    path = str(tmp_path / "store")
    one, other = KeptStore(path, 100, 16), KeptStore(path, 100, 16)
    one.add([1, 2, 3])
    one.save()
    other.add([4, 5])
    other.save()
    assert read(path, 100).tolist() == [1, 2, 3, -1, 4, 5, -1]
    one.add([6])
    one.save()
    one.save()
    assert read(path, 100).tolist() == [1, 2, 3, -1, 4, 5, -1, 6, -1]
    for token in range(10, 20):
        other.add([token])
    other.save()
    assert read(path, 100).tolist() == [x for token in range(12, 20) for x in (token, -1)]


def test_processes_that_end_together_all_leave_their_texts(tmp_path, monkeypatch):
    """Each has a store of its own, as threads have here: the lock is the system's."""
    path, begin, texts = str(tmp_path / "store"), Barrier(4), [[10 * i + j for j in range(5)] for i in range(4)]
    whole = store_file.read

    def slow(*given):
        found = whole(*given)
        time.sleep(0.05)
        return found

    KeptStore(path, 100).save()
    monkeypatch.setattr(store_file, "read", slow)
    stores = [KeptStore(path, 100) for _ in texts]

    def end(i: int) -> None:
        stores[i].add(texts[i])
        begin.wait(10)
        stores[i].save()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(end, range(4)))
    tokens = whole(path, 100).tolist()
    assert sorted(tokens[i : i + 6] for i in range(0, 24, 6)) == [[*text, -1] for text in texts]
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(("texts", "capacity"), [(1, 128), (99, 64)])
def test_a_file_that_another_program_damaged_stays_and_the_texts_do_not_grow_without_end(tmp_path, texts, capacity):
    store = KeptStore(str(tmp_path / "store"), 100, capacity)
    (tmp_path / "store").write_text("notes", encoding="utf-8")
    for token in range(texts):
        store.add([token] * 9)
    with pytest.warns(StoreFileWarning, match="it is no file of texts"):
        store.save()
    assert (tmp_path / "store").read_text(encoding="utf-8") == "notes"
    (tmp_path / "store").unlink()
    store.save()
    assert len(store._unsaved) == 0
    every = [x for token in range(texts) for x in (*[token] * 9, -1)]
    assert read(str(tmp_path / "store"), 100).tolist() == every[-capacity:]


def test_others_may_read_a_store_as_they_may_read_any_new_file(tmp_path):
    store = KeptStore(str(tmp_path / "store"), 100)
    store.add([1, 2, 3])
    store.save()
    (tmp_path / "usual").touch()
    assert (tmp_path / "store").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_file_that_cannot_be_written_is_one_warning_and_the_texts_stay(tmp_path):
    (tmp_path / "gone").mkdir()
    store = KeptStore(str(tmp_path / "gone" / "store"), 100)
    atexit.unregister(store.save)
    (tmp_path / "gone").rmdir()
    with pytest.warns(StoreFileWarning, match=r"Cannot write .*store"):
        store.save()
    store.add([1, 2, 3, 4, 5, 6])
    assert from_store(store, [1, 2, 3, 4]) == [5, 6]


def test_threads_that_save_at_once_wait_for_each_other(tmp_path, monkeypatch):
    """Each writes the file under its temporary name, so that the other one's would be taken away."""
    begin, replace = Barrier(2), Path.replace

    def slow(*arguments) -> Path:
        time.sleep(0.2)
        return replace(*arguments)

    monkeypatch.setattr(Path, "replace", slow)
    store = KeptStore(str(tmp_path / "store"), 100)

    def add(first: int) -> None:
        store.add(range(first, first + 5))
        begin.wait(10)
        store.save()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, (10, 20)))  # a warning is an error here
    texts = read(str(tmp_path / "store"), 100).tolist()
    assert sorted((texts[:6], texts[6:])) == [[*range(10, 15), -1], [*range(20, 25), -1]]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


TOKENS, ABOUT, NO_TEXTS = np.array([1, 2, -1], np.int32), {"format": FORMAT, "vocab_size": "257"}, "no file of texts; "


def saved(about: dict[str, str] = ABOUT, **tensors: np.ndarray) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path, about)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("not a store", encoding="utf-8"), NO_TEXTS + "name another file"),
        (Path.touch, NO_TEXTS),
        (lambda path: path.write_bytes(save({"tokens": TOKENS}, ABOUT)[:-2]), NO_TEXTS),
        (saved(weights=TOKENS), NO_TEXTS),
        (saved({"vocab_size": "257"}, tokens=TOKENS), NO_TEXTS),
        (saved(tokens=TOKENS.astype(np.float32)), NO_TEXTS),
        (saved({**ABOUT, "vocab_size": "300"}, tokens=TOKENS), "a vocabulary of 300, and the target has 257"),
        (saved(tokens=np.array([1, 400], np.int32)), "has tokens that the target has not"),
        (Path.mkdir, "it is a folder"),
    ],
)
def test_a_bad_file_is_one_sentence_and_stays_as_it_is(folder, tmp_path, make, words):
    path = tmp_path / "store"
    make(path)
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(ForetokenError, match=words):
        foretoken.load(folder, drafter="suffix", suffix_store=path)
    assert before is None or path.read_bytes() == before


def test_what_has_no_store_takes_no_file(folder, tmp_path):
    for drafter in ("ngram", "none", "ngram+self", "self"):
        with pytest.raises(ForetokenError, match=r"suffix_store is for drafter suffix"):
            foretoken.load(folder, drafter=drafter, suffix_store=tmp_path / "store")
