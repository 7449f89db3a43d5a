"""Where a training run writes: never over a model or another head; and what Ctrl-C leaves there."""

import json
import signal
from pathlib import Path

import pytest

import tiny
from command import Command
from foretoken.core.errors import ForetokenError
from foretoken.train.folder import check_out, check_own
from foretoken.train.loop import Trainer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and some texts."""
    root = tmp_path_factory.mktemp("train")
    tiny.save(tiny.llama(0), root / "target")
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i * i}\n" * 3}) + "\n" for i in range(4)]
    (root / "data.jsonl").write_text("".join(lines))
    return root


def train(run: Command, root: Path, out: Path, kind: str = "medusa", *more: str) -> tuple[int, str, str]:
    return run("train", kind, "--target", root / "target", "--data", root / "data.jsonl", "--held-out",
               root / "data.jsonl", "--out", out, "--batch", 2, "--length", 48, "--tokens", 384, *more)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_and_another_head_are_not_overwritten(run: Command, workplace: Path, tmp_path: Path) -> None:
    target, head = workplace / "target", tmp_path / "head"
    before = contents(target)
    code, out, err = train(run, workplace, target)
    assert (code, out) == (2, "")
    assert f"Folder {target} holds " in err
    assert "name a new or empty folder" in err
    assert contents(target) == before
    head.mkdir()
    code, _, err = train(run, workplace, head)  # an empty folder is good
    assert code == 0, err
    code, _, err = train(run, workplace, head)  # its own run, of which nothing is left to do
    assert code == 0, err
    (head / "checkpoint.pt").unlink()
    before = contents(head)
    for kind, more in (("hydra", []), ("medusa", ["--seed", "1"])):  # as a head that was downloaded
        code, _, err = train(run, workplace, head, kind, *more)
        assert code == 2
        assert "a head of another training run" in err
    assert contents(head) == before
    code, _, err = train(run, workplace, head)
    assert code == 0, err


def test_what_is_left_of_a_run_that_was_killed_is_its_own(tmp_path: Path) -> None:
    check_out(tmp_path / "new")
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "checkpoint.pt.tmp").touch()
    check_out(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ForetokenError, match=r"holds notes\.txt and no training run"):
        check_out(tmp_path)
    (tmp_path / "provenance.json").write_text("[1, 2")
    with pytest.raises(ForetokenError, match="another training run"):
        check_own(tmp_path, {"kind": "eagle"})


def test_ctrl_c_saves_a_checkpoint_of_a_whole_step(
    run: Command, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    texts = Trainer.texts

    def interrupted(self: Trainer, step: int) -> object:
        if step == 1 and not begun:
            begun.append(step)
            signal.raise_signal(signal.SIGINT)  # in the midst of the second step
        return texts(self, step)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run, workplace, whole)[0] == 0
    # a shell's background jobs ignore interrupts, and would pass that on to this process
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Trainer, "texts", interrupted)
    try:
        code, _, err = train(run, workplace, parts)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert "goes on from the last checkpoint" in err
    assert not (parts / "config.json").exists()
    code, _, err = train(run, workplace, parts)
    assert code == 0, err
    name = "medusa_lm_head.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_absurd_sizes_are_refused(run: Command, workplace: Path, tmp_path: Path) -> None:
    for option in ("--levels", "--layers"):
        code, _, err = train(run, workplace, tmp_path / "head", "medusa", option, "100000")
        assert code == 2
        assert f"{option} is 100000: it must be from 1 to 64" in err
