"""`foretoken train`: a run, one that goes on from a head or after Ctrl-C, bad input, and which folders it writes to."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from command import Command
from foretoken.core.errors import ForetokenError
from foretoken.train.folder import check_out, check_own
from foretoken.train.loop import Trainer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets and some texts."""
    root = tmp_path_factory.mktemp("train")
    for seed, name in enumerate(("target", "other")):
        tiny.save(tiny.llama(seed, layers=6), root / name)
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i * i}\n" * 3}) + "\n" for i in range(6)]
    (root / "data.jsonl").write_text("".join(lines))
    return root


def train(run: Command, root: Path, out: Path | str, *more: object, kind: str = "medusa", target: str = "target"):
    return run("train", kind, "--target", root / target, "--data", root / "data.jsonl", "--held-out",
               root / "data.jsonl", "--out", out, "--batch", 2, "--length", 48, "--tokens", 384, *more)  # fmt: skip


def trained(run: Command, root: Path, out: Path | str, *more: object, **options: str) -> tuple[str, str]:
    """What a run that succeeds prints, and what it tells on stderr."""
    code, printed, err = train(run, root, out, *more, **options)
    assert code == 0, err
    return printed, err


def refused(says: str, *given: Any, **options: str) -> None:
    code, printed, err = train(*given, **options)
    assert (code, printed, says in " ".join(err.split())) == (2, "", True), err


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_command(run: Command, workplace: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "head", ("--evaluate-every", 2, "--json")
    out, _ = trained(run, workplace, folder, *options, kind="gumiho")
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["step"] == lines[-1]["steps"]
    assert len(lines[-1]["greedy"]) == 7
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["plan"]["kind"] == "gumiho"
    assert facts["argv"]
    assert facts["torch"]
    assert "Held-out" in (folder / "README.md").read_text()
    # Nothing is left to do; the log tells each step once, also after reports that came behind the last checkpoint.
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log + json.dumps({"step": 10_000}) + '\n\0\0\n[]\n{"step": 10_')
    trained(run, workplace, folder, *options, kind="gumiho")
    assert (folder / "log.jsonl").read_text() == log
    refused("made with another target", run, workplace, folder, *options, kind="gumiho", target="other")
    again, err = trained(run, workplace, "again", "--cache", "cache", "--json", kind="gumiho")
    assert "will take up to 0.00 GB" in err
    assert json.loads(again.splitlines()[-1])["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-4)
    drafting = ("--drafter", folder, "--max-new-tokens", 12, "--temperature", 0, "--json")
    code, _, err = run("generate", "def f", "--target", workplace / "target", *drafting)
    assert code == 0, err


@pytest.mark.parametrize("option", ["--data", "--held-out"])
def test_the_command_names_empty_files(option: str, run: Command, workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("")
    data = ["--data", workplace / "data.jsonl"] if option == "--held-out" else []
    given = ("train", "medusa", "--target", workplace / "target", "--out", "bad", *data)
    run.refused(f"There is no text at all in {tmp_path / 'none.txt'}", *given, option, tmp_path / "none.txt")


def test_a_run_that_goes_on_from_a_head(run: Command, workplace: Path, tmp_path: Path) -> None:
    trained(run, workplace, "first", kind="gumiho")
    held_out, begin = [], ("--tokens", 48, "--begin", "first")
    for name, options in (("new", begin[:2]), ("begun", begin)):
        out, _ = trained(run, workplace, name, *options, "--json", kind="gumiho")
        held_out.append(json.loads(out.splitlines()[-1])["loss"])
    assert held_out[1] < held_out[0]
    assert "the head `first` |" in (tmp_path / "begun" / "README.md").read_text()
    refused("whose head would be overwritten", run, workplace, "first", *begin, kind="gumiho")
    refused("is of kind gumiho: --begin needs one of kind eagle", run, workplace, "other", *begin, kind="eagle")


def test_a_model_and_another_head_are_not_overwritten(run: Command, workplace: Path, tmp_path: Path) -> None:
    target, head = workplace / "target", tmp_path / "head"
    before = contents(target)
    refused(f"Folder {target} holds ", run, workplace, target)
    refused("name a new or empty folder", run, workplace, target)
    assert contents(target) == before
    head.mkdir()
    trained(run, workplace, head)  # an empty folder is good
    trained(run, workplace, head)  # its own run, of which nothing is left to do
    (head / "checkpoint.pt").unlink()
    before = contents(head)
    for kind, more in (("hydra", []), ("medusa", ["--seed", "1"])):  # as a head that was downloaded
        refused("a head of another training run", run, workplace, head, *more, kind=kind)
    assert contents(head) == before
    trained(run, workplace, head)


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


@pytest.mark.usefixtures("interruptible")
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
    trained(run, workplace, whole)
    monkeypatch.setattr(Trainer, "texts", interrupted)
    code, _, err = train(run, workplace, parts)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert code == 130
    assert "goes on from the last checkpoint" in err
    assert not (parts / "config.json").exists()
    trained(run, workplace, parts)
    name = "medusa_lm_head.safetensors"
    assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("medusa", ("--length", 1), "--length is 1: it must be at least 16"),
        ("medusa", ("--draft-vocab", 3), "only eagle3 can have a trimmed draft vocabulary"),
        ("medusa", ("--data", "bad.jsonl"), "bad.jsonl, line 1 is no training text"),
        ("gumiho", ("--levels", 2), "Head gumiho needs at least 1 layer and 3 levels"),
    ],
)
def test_what_is_wrong_is_found_before_a_model_is_loaded(
    run: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: tuple[object, ...], says: str
) -> None:
    (workplace / "bad.jsonl").write_text("[")
    monkeypatch.setattr("foretoken.models.load.load_frozen", None)
    found = [workplace / option if option == "bad.jsonl" else option for option in options]
    refused(says, run, workplace, workplace / "never", *found, kind=kind)


def test_texts_are_cut_to_the_context_of_the_target(run: Command, workplace: Path, tmp_path: Path) -> None:
    """GPT-2 has no positions behind it, and some scalings of positions change there."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=24, vocab_size=257, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path / "gpt2")
    trained(run, workplace, tmp_path / "head", target=str(tmp_path / "gpt2"))
