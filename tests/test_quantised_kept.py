"""What a checkpoint becomes when it is quantised is kept, and read instead of the checkpoint at the next start."""

from pathlib import Path

import pytest
import torch

import gguf_zoo
from foretoken.catalogue.kept import UnkeptWarning
from foretoken.models import load as loading
from foretoken.models import quantised
from foretoken.models.identity import fingerprint
from foretoken.models.load import load_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def save(folder: Path, architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **how: object) -> str:
    torch.nn.Module.to(gguf_zoo.model(architecture, **SIZES, **how), dtype).save_pretrained(folder)
    return str(folder)


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> None:
        raise AssertionError("the checkpoint is read again")

    monkeypatch.setattr(loading, "_pretrained", again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False), ("gemma3", True)])
def test_the_next_start_finds_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, tied: bool, dtype: torch.dtype
) -> None:
    """The same as what is made without a file in between: scores bit for bit, and the fingerprint."""
    source = save(tmp_path / "model", architecture, dtype, tied=tied)
    fresh = quantised.pack_quantised(loading._pretrained(source, "auto", False), "q4_1").eval()
    first = load_model(source, CPU, quantise="q4_1")
    unreadable(monkeypatch)
    second = load_model(source, CPU, quantise="q4_1")
    assert first.dtype == second.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert fingerprint(first) == fingerprint(second)
    loading.pack(fresh, first.dtype)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = fresh(ids).logits
        assert torch.equal(first.model(ids).logits, wanted)
        assert torch.equal(second.model(ids).logits, wanted)


def test_each_kind_is_kept_by_itself_and_made_anew_where_the_checkpoint_changes(tmp_path: Path, home: Path) -> None:
    source = save(tmp_path / "model")
    for kind in ("q4_1", "q8_0"):
        load_model(source, CPU, quantise=kind)
    assert sorted(path.name for path in (home / "quantised").iterdir()) == ["q4_1", "q8_0"]
    before = fingerprint(load_model(source, CPU, quantise="q4_1"))
    save(tmp_path / "model", tied=False)
    assert fingerprint(load_model(source, CPU, quantise="q4_1")) != before


def test_the_target_as_its_own_drafter_is_read_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "model")
    target = load_model(source, CPU)
    first = loading.load_own(target, source, "q4_1")
    unreadable(monkeypatch)
    second = loading.load_own(target, source, "q4_1")
    assert second.model.get_input_embeddings() is target.model.get_input_embeddings()
    assert fingerprint(first) == fingerprint(second)


def test_without_room_it_runs_all_the_same(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "model")
    wanted = fingerprint(load_model(source, CPU, quantise="q4_0"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(quantised, "write_stored", full)
    with pytest.warns(UnkeptWarning, match=r"cannot be kept in .*q4_0 \(No space left on device\)"):
        lm = load_model(source, CPU, quantise="q4_0")
    assert fingerprint(lm) == wanted
    assert not [path for path in (tmp_path / "full" / "quantised" / "q4_0").iterdir() if path.is_dir()]
