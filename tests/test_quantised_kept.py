"""What a checkpoint becomes when it is quantised is kept, and read instead of the checkpoint at the next start."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from huggingface_hub import constants
from transformers import BioGptConfig, BioGptForCausalLM, GPT2Config, GPT2LMHeadModel

import gguf_zoo
import tiny
from command import Command
from foretoken.catalogue.kept import BLOCK, HEADER, UnkeptWarning, kept
from foretoken.core.errors import ForetokenError
from foretoken.models import quantised
from foretoken.models.identity import fingerprint
from foretoken.models.load import load_model
from foretoken.models.panels import PackedLinear
from gguf_zoo import save_folder
from raising import raising
from serving import wait_until

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("home")


def test_each_kind_is_kept_by_itself_and_made_anew_where_the_checkpoint_changes(tmp_path: Path, home: Path) -> None:
    source = save_folder(tmp_path / "model")
    for kind in ("q4_1", "q4_k", "q8_0"):
        load_model(source, CPU, quantise=kind)
    assert sorted(path.name for path in (home / "quantised").iterdir()) == ["q4_1", "q4_k", "q8_0"]
    before = fingerprint(load_model(source, CPU, quantise="q4_1"))
    save_folder(tmp_path / "model", tied=False)
    assert fingerprint(load_model(source, CPU, quantise="q4_1")) != before


def test_without_room_it_runs_all_the_same(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_folder(tmp_path / "model")
    wanted = fingerprint(load_model(source, CPU, quantise="q4_0"))
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(quantised, "write_stored", raising(OSError(28, "No space left on device")))
    with pytest.warns(UnkeptWarning, match=r"cannot be kept in .*q4_0 \(No space left on device\)"):
        lm = load_model(source, CPU, quantise="q4_0")
    assert fingerprint(lm) == wanted
    assert not [path for path in (tmp_path / "full" / "quantised" / "q4_0").iterdir() if path.is_dir()]


def gpt2(folder: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(folder)


def narrow(folder: Path) -> None:
    tiny.llama(0, hidden=40).save_pretrained(folder)


def test_a_tied_lm_head_of_another_name_is_packed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BioGptForCausalLM(BioGptConfig(vocab_size=101, tie_word_embeddings=True, **sizes))
    model.save_pretrained(tmp_path)
    for _ in range(2):  # the second start reads what the first one kept
        lm = load_model(str(tmp_path), CPU, quantise="q8_0")
        assert isinstance(lm.weights.get_output_embeddings(), PackedLinear)


@pytest.mark.parametrize("made", [gpt2, narrow])
def test_a_model_whose_layers_no_block_fits_is_refused(tmp_path: Path, made: Callable[[Path], None]) -> None:
    """Of GPT-2, whose layers are no `nn.Linear`, the LM head alone would be quantised, of the other one nothing."""
    made(tmp_path / "model")
    with pytest.raises(
        ForetokenError, match=r"cannot be quantised to q4_0: its layers have no nn\.Linear with rows of"
    ):
        load_model(str(tmp_path / "model"), CPU, quantise="q4_0")


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (HEADER, None), (1 << 19, (1 << 19) + (1 << 15)), (-BLOCK, None), (-1, None)]
)
def test_another_file_of_equal_size_and_time_is_noticed(tmp_path: Path, first: int, last: int | None) -> None:
    """first, last: the bytes that differ, in a file of 1 MiB."""
    source, made = tmp_path / "model.bin", []

    def make(folder: Path) -> None:
        made.append(source.read_bytes())
        folder.mkdir()
        (folder / "copy").write_bytes(made[-1])

    content = bytearray(1 << 20)
    source.write_bytes(content)
    about = source.stat()
    for _ in range(2):
        kept(source, "section", make)
    assert len(made) == 1
    content[first:last] = b"\1" * len(content[first:last])
    source.write_bytes(content)
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    folder = kept(source, "section", make)
    assert (folder / "copy").read_bytes() == content
    assert len(made) == 2


def test_who_waits_for_another_start_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.bin").touch()
    begun, go_on = Event(), Event()

    def make(folder: Path) -> None:
        begun.set()
        assert go_on.wait(60)
        folder.mkdir()

    def start() -> Path | None:
        return kept(tmp_path / "model.bin", "section", make)

    with caplog.at_level("INFO", "foretoken"), ThreadPoolExecutor(2) as threads:
        first = threads.submit(start)
        assert begun.wait(60)
        second = threads.submit(start)
        wait_until(lambda: caplog.messages == ["another process reads model.bin for the first time: waiting for it"])
        go_on.set()
        assert first.result() == second.result()


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the hub's client would keep some/model, without a network; nothing is in it yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (False, "Model some/model is no folder here, and cannot be had from the hub: "),
        (True, "Cannot load a causal language model from some/model: "),
    ],
    ids=["nothing", "no weights"],
)
def test_a_hub_id_that_cannot_be_brought_is_one_sentence(run: Command, snapshot: Path, here: bool, said: str) -> None:
    """here: whether its configuration and its tokenizer are in the hub's cache."""
    if here:
        gguf_zoo.wide().config.save_pretrained(snapshot)
        tiny.tokenizer().save_pretrained(snapshot)
    code, out, err = run("generate", "x", "--target", "some/model", "--quantise", "q4_0")
    assert (code, out) == (2, "")
    assert err.startswith(f"foretoken: {said}")
    assert len(err.splitlines()) == 1


def test_a_model_of_the_hub_is_kept_once_its_weights_are_here(snapshot: Path, home: Path) -> None:
    """What is kept before would stand for the files that were here first: for the configuration alone."""
    made = gguf_zoo.wide()
    made.config.save_pretrained(snapshot)
    quantised.kept_quantised("some/model", "q4_0", lambda: made)
    assert not (home / "quantised").exists()
    save_folder(snapshot)
    load_model("some/model", CPU)  # the hub is asked for changes each time
    assert not (home / "skeletons").exists()
    load_model("some/model", CPU, quantise="q4_0")
    assert [path.name for path in (home / "quantised").iterdir()] == ["q4_0"]
