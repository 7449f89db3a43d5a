"""Files that appear whole or not at all."""

import json
import os
import time
from pathlib import Path
from threading import Thread

import pytest
import torch

from foretoken.core import files
from foretoken.core.errors import ForetokenError
from foretoken.core.files import append, check_file, check_folder, write
from foretoken.measure import child_acceptance
from foretoken.measure.results import write_lines
from foretoken.profile import Profile


def half(path: Path) -> None:
    path.write_text("half")
    raise OSError(28, "No space left on device")


def test_a_failed_or_interrupted_write_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    write(path, lambda temporary: temporary.write_text("old"))
    with pytest.raises(ForetokenError, match=r"Cannot write .*/f: No space left on device\.$"):
        write(path, half)
    with pytest.raises(KeyboardInterrupt):
        write(path, interrupted)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "old")]


def interrupted(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "save",
    [
        lambda path: Profile("", "", {}, "", "", None, None, (0.0, 0.0, 0.0), 0.0, {}, {}, []).write(str(path)),
        lambda path: child_acceptance.write(
            child_acceptance.ChildAcceptance("rrsw", "iid", 1.0, (0.5,), (0.1,), 9), path, {"seed": 0}
        ),
    ],
)
def test_every_writer_cleans_up(save, tmp_path):
    folder = tmp_path / "taken"
    folder.mkdir()
    with pytest.raises(ForetokenError, match=r"Cannot write .*taken"):
        save(folder)  # nothing can be moved over a folder
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(ForetokenError, match="Cannot write"):
        save(tmp_path / ("x" * 300))
    save(tmp_path / "fine")
    assert json.loads((tmp_path / "fine").read_text())
    with pytest.raises(ForetokenError, match="Cannot write"):
        save(tmp_path / "fine" / "below")  # a file is no folder


def test_what_cannot_be_written_is_refused_before_it_is_made(tmp_path):
    check_file(tmp_path / "f")
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "f").touch()
    for check, path, why in (
        (check_file, tmp_path, "it is a folder"),
        (check_file, tmp_path / "no" / "f", "No such file or directory"),
        (check_file, tmp_path / "f" / "g", "Not a directory"),
        (check_folder, tmp_path / "f", "Not a directory"),
        (check_folder, tmp_path / "f" / "g", "Not a directory"),
        (check_folder, tmp_path / "x\udcff", "its name is not UTF-8, so that .*; name another folder"),
        (check_folder, tmp_path / "x\udcff" / "g", "its name is not UTF-8, so that .*; name another folder"),
    ):
        with pytest.raises(ForetokenError, match=rf"Cannot (write|use) .*{path.name}: {why}\.$"):
            check(path)


def test_two_processes_may_write_one_file_at_once(tmp_path, monkeypatch):
    """Each under a temporary name of its own: the last one to finish wins, and its file is whole."""
    path = tmp_path / "f"

    def slowly(temporary):
        temporary.write_text("slow")
        write(path, lambda other: other.write_text("quick"))
        assert path.read_text() == "quick"

    write(path, slowly)
    assert path.read_text() == "slow"
    assert list(tmp_path.iterdir()) == [path]


def lines(path: Path) -> None:
    write_lines(str(path), [{"long": "x" * 100_000}], {})


def tensors(path: Path) -> None:
    """Where torch is given a file it raises an error of its own while it handles the system's."""

    def to(temporary: Path) -> None:
        with temporary.open("wb") as file:
            torch.save(torch.zeros(100_000), file)

    write(path, to)


def line(path: Path) -> None:
    path.symlink_to("/dev/full")
    append(path, "line\n")


@pytest.mark.parametrize("save", [lines, tensors, line])
def test_a_full_disk_is_one_sentence(save, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "token_hex", lambda _: "b")
    (tmp_path / ".f.b.tmp").symlink_to("/dev/full")  # where what is written goes until all is there
    with pytest.raises(ForetokenError, match=r"Cannot write .*/f: No space left on device\.$"):
        save(tmp_path / "f")
    assert save is line or not list(tmp_path.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_keeps_its_permissions_and_a_link_stays_one(tmp_path):
    there, link = tmp_path / "there" / "f", tmp_path / "link"
    there.parent.mkdir()
    link.symlink_to(there)
    write(link, lambda path: path.write_text("1"))
    assert there.read_text() == "1"
    for allowed in (0o600, 0o640, 0o666):
        there.chmod(allowed)
        write(link, lambda path: path.write_text("2"))
        assert (link.is_symlink(), mode(there), there.read_text()) == (True, allowed, "2")
    assert list(there.parent.iterdir()) == [there]


def test_names_may_be_as_long_as_the_system_allows(tmp_path):
    path = tmp_path / ("f" * 255)
    check_file(path)
    write(path, lambda temporary: temporary.write_text("1"))
    assert path.read_text() == "1"
    with pytest.raises(ForetokenError, match="File name too long"):
        check_file(tmp_path / ("f" * 256))


def test_names_at_which_nothing_can_be_written(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (("loop", "loop|symbolic links"), ("a\0b", "null")):
        with pytest.raises(ForetokenError, match=f"Cannot write .*{why}"):
            check_file(tmp_path / name)


def test_the_output_of_a_program_is_not_replaced(tmp_path):
    """Where it goes to a file, /dev/stdout leads there."""
    with (tmp_path / "log").open("w") as file:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for path in (Path(f"/dev/fd/{file.fileno()}"), tmp_path / "link"):
            with pytest.raises(ForetokenError, match="stands for a file that is open already"):
                check_file(path)


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As a device, of which root would otherwise lose /dev/null."""
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    check_file(pipe)
    reader = Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write(pipe, lambda path: path.write_text("text"))
    reader.join()
    assert got == ["text"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_that_is_write_protected_stays_as_it_is(tmp_path, monkeypatch):
    """It could be replaced all the same. Root may write to any file, so that the system's answer is given here."""
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o444)
    monkeypatch.setattr(files.os, "access", lambda path, mode: (Path(path).stat().st_mode & 0o200) != 0)
    with pytest.raises(ForetokenError, match=r"Cannot write .*/f: Permission denied\.$"):
        check_file(file)
    with pytest.raises(ForetokenError, match=r"Cannot write .*/f: Permission denied\.$"):
        write(file, lambda path: path.write_text("new"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]
    file.chmod(0o644)
    write(file, lambda path: path.write_text("new"))
    assert file.read_text() == "new"


def test_what_a_killed_process_left_is_removed_in_the_end(tmp_path):
    for name, age in ((".f.0123abcd.tmp", files.LEFT_S + 60), (".f.89abcdef.tmp", 60), (".g.0123abcd.tmp", 10_000)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write(tmp_path / "f", lambda path: path.write_text("whole"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".f.89abcdef.tmp", ".g.0123abcd.tmp", "f"]
