"""Models in GGUF files run with their weights as they are in the file, from text to text."""

import mmap
import os
import platform
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import foretoken
import gguf_zoo
import models_zoo
from foretoken.audit import models
from foretoken.audit.report import FAILED, OK
from foretoken.catalogue import kept as cache
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.gguf import folder as gguf_folder
from foretoken.gguf.held import HOLDERS, held, holder
from foretoken.kernel import compile
from foretoken.models import kept_model, load, packed
from foretoken.models import named as names
from foretoken.models.identity import fingerprint
from foretoken.models.load import for_drafting, load_model, load_tokenizer
from foretoken.models.mapped import read_ahead, weight_files
from foretoken.models.named import QUANTISED
from foretoken.models.packed import _bytes_read, share_read
from foretoken.models.panels import PackedEmbedding, PackedLinear, PanelLinear
from foretoken.recipe import check_engine
from gguf_zoo import save_wide
from leaks import leak
from raising import raising
from serving import wait_until
from thinning import one_in

CPU = torch.device("cpu")
TYPES = gguf.GGMLQuantizationType
MIXES = {
    "blocks of 32": [TYPES.Q8_0, TYPES.Q4_0, TYPES.Q5_1, TYPES.Q4_1, TYPES.Q5_0],
    "blocks of 256": [TYPES.Q4_K, TYPES.Q6_K, TYPES.Q5_K],
    "held in wider blocks": [TYPES.Q3_K, TYPES.IQ4_XS, TYPES.IQ4_NL],
}
PROMPTS = ["the cat sat on", "the rat", "on the mat, the"]


pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(("architecture", "mix"), one_in(7, product(gguf_zoo.ARCHITECTURES, MIXES)))
def test_every_kind_in_every_architecture(tmp_path: Path, architecture: str, mix: str):
    """Scores are those of the same weights in float32, but for activations in 8 bits, and in a drafter for keys and
    values in bfloat16; and where the kernel runs all of the model greedy text is the same, bit for bit, alone and in a
    batch, plain and drafted."""
    path = save_wide(
        tmp_path / "model.gguf", architecture, MIXES[mix], tied=mix == "blocks of 32" or architecture == "gemma"
    )
    plain = foretoken.load(path)
    lm = plain.target.lm
    linears = {name: module for name, module in lm.model.named_modules() if isinstance(module, PanelLinear)}
    floats = [name for name, module in linears.items() if not isinstance(module, PackedLinear)]
    routers = [f"model.layers.{layer}.mlp.router" for layer in range(2)]  # which files have in float32
    assert floats == (routers if architecture == "qwen3moe" else [])
    assert isinstance(lm.model.get_input_embeddings(), PackedEmbedding)
    assert lm.execution == "kernel"
    exact = load_model(path, CPU, torch.float32, compile="off").model
    ids = torch.tensor([plain.tokenizer(" ".join(PROMPTS)).input_ids])
    with torch.inference_mode():
        got, wanted = lm.model(ids).logits[0], exact(ids).logits[0]
    # Rounding changes which experts are chosen in a few rows, and so all of such a row.
    usual = torch.Tensor.median if architecture == "qwen3moe" else torch.Tensor.mean
    more = 1.6 if architecture == "lfm2" else 1  # whose convolutions multiply three rounded products
    assert usual((got - wanted).square().mean(1)) < (more * 0.03) ** 2 * wanted.var()
    for halved, model in enumerate((lm, for_drafting(load_model(path, CPU)))):
        rows = model.open(1, ids.shape[1])
        rows.join()
        (scores,) = rows.score(ids.tolist(), [list(range(-1, ids.shape[1] - 1))])
        assert rows.cache.paired == halved
        allowed = 0.035 if halved else 0.03  # rounding keys and values adds to what rounding activations does
        assert usual((scores - wanted).square().mean(1)) < (more * allowed) ** 2 * wanted.var()
    texts = [plain.generate(prompt, max_new_tokens=10, temperature=0.0).text for prompt in PROMPTS]
    for drafter, tree in (("ngram", "chain:4"), (path, "chain:3"), (path, "kary:2x2")):
        engine = foretoken.load(path, drafter=drafter, tree=tree)
        results = engine.generate(PROMPTS, max_new_tokens=10, temperature=0.0)
        assert [result.text for result in results] == texts, (drafter, tree)


@pytest.mark.parametrize(("head_dim", "execution"), one_in(2, [(64, "kernel"), (40, "panels")]))
def test_the_audit_holds_the_scores_of_trees_against_plain_decoding(
    tmp_path: Path, head_dim: int, execution: str, monkeypatch: pytest.MonkeyPatch
):
    """Transformers' own order of sums may round a row of activations otherwise, which is no error of ours."""
    engine = foretoken.load(
        save_wide(tmp_path / "model.gguf", "gemma3", TYPES.Q4_0, head_dim=head_dim), drafter="ngram"
    )
    assert engine.target.lm.execution == execution
    assert [check.outcome for check in models.tree_scores(engine, 0).checks] == [OK]
    assert [check.outcome for check in models.greedy(engine, 0).checks] == [OK, OK]
    leak(monkeypatch, 1, 2)  # its own continuation
    assert [check.outcome for check in models.tree_scores(engine, 0).checks] == [FAILED]


def test_floats_stay_floats(tmp_path: Path):
    """A file without quantised weights runs as a folder with the same weights does."""
    for kind, dtype in ((TYPES.BF16, torch.bfloat16), (TYPES.F16, torch.float32), (TYPES.F32, torch.float32)):
        path = save_wide(tmp_path / f"{kind.name}.gguf", "qwen2", kind)
        lm = load_model(path, CPU)
        assert (lm.dtype, lm.execution) == (dtype, "kernel")
        exact = load_model(path, CPU, dtype, compile="auto")
        assert torch.equal(*(x.model(torch.arange(9)[None]).logits for x in (lm, exact)))


@pytest.mark.parametrize("kind", HOLDERS)
def test_wider_blocks_hold_the_same_weights(kind: str):
    """All bits of a block but those of its scale are random, so all codes and subs occur."""
    raw = gguf_zoo.blocks(np.empty((12, 1024), np.float32), TYPES[kind.upper()])
    got = gguf.dequantize(held(kind, raw), TYPES[holder(kind).upper()])
    wanted = gguf.dequantize(raw, TYPES[kind.upper()])
    assert len(np.unique(wanted)) > 10
    if kind == "iq4_xs":  # its scales have more bits than a float16
        np.testing.assert_allclose(got, wanted, rtol=2**-11, atol=0)
    else:
        assert np.array_equal(got, wanted)


def test_what_the_kernel_does_not_have_is_dequantised(tmp_path: Path):
    path = save_wide(tmp_path / "model.gguf", "llama", [TYPES.Q4_K, TYPES.Q2_K])
    with pytest.warns(packed.DequantisedWarning, match=r"type q2_k: model\.layers.* and \d+ more of .* MB instead of"):
        lm = load_model(path, CPU)
    assert lm.execution == "kernel"
    exact = load_model(path, CPU, torch.float32, compile="off")
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        got, wanted = (x.model(ids).logits for x in (lm, exact))
    assert (got - wanted).square().mean() < (0.03**2) * wanted.var()


@pytest.mark.parametrize("kind", one_in(3, QUANTISED))
def test_folders_are_quantised_as_they_are_loaded(tmp_path: Path, kind: str):
    gguf_zoo.wide().save_pretrained(tmp_path / "folder")
    save_wide(tmp_path / "model.gguf", "llama", TYPES[kind.upper()], embedding=TYPES.F32)
    one = load_model(str(tmp_path / "folder"), CPU, quantise=kind)
    other = load_model(str(tmp_path / "model.gguf"), CPU)
    assert one.execution == "kernel"
    linears = [x for x in one.model.modules() if isinstance(x, PackedLinear)]
    assert len(linears) == 2 * 7 + 1
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        states = [x.model.model(ids).last_hidden_state for x in (one, other)]  # the file's LM head is float32
    assert torch.allclose(*states, rtol=1e-3, atol=1e-3)
    with pytest.raises(ForetokenError, match="on a CPU alone"):
        load_model(str(tmp_path / "folder"), CPU, quantise=kind, compile="off")


def test_the_second_start_reads_what_the_first_one_kept(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_wide(tmp_path / "model.gguf")
    first = fingerprint(load_model(path, CPU))
    (folder,) = [x for x in (home / "gguf").iterdir() if x.is_dir()]
    with monkeypatch.context() as patched:
        patched.setattr(gguf_folder, "open_gguf", raising(AssertionError("the GGUF file is read again")))
        assert fingerprint(load_model(path, CPU)) == first
        assert load_tokenizer(path).eos_token == "<|im_end|>"
    for damage in ("packed.safetensors", "config.json", "tokenizer.json", "origin.json"):
        content = (folder / damage).read_bytes()
        for left in (None, content[: len(content) // 2], bytes(len(content))):  # the last as a power cut leaves it
            (folder / damage).unlink() if left is None else (folder / damage).write_bytes(left)
            assert fingerprint(load_model(path, CPU)) == first
            assert (folder / damage).stat().st_size == len(content)
    save_wide(Path(path), kind=TYPES.Q4_0)  # another model in the same place
    assert fingerprint(load_model(path, CPU)) != first
    assert sorted(x.name for x in (home / "gguf").iterdir()) == sorted([folder.name, f".{folder.name}.lock"])


def test_a_file_with_any_name_is_kept(tmp_path: Path, home: Path) -> None:
    """Of 250 bytes, not all of them UTF-8."""
    path = os.fsdecode(os.fsencode(tmp_path / "m") + b"\xff" * 240 + b".gguf")
    save_wide(Path(path))
    first = fingerprint(load_model(path, CPU))
    assert len([folder for folder in (home / "gguf").iterdir() if folder.is_dir()]) == 1
    assert fingerprint(load_model(path, CPU)) == first


@pytest.mark.parametrize("architecture", one_in(2, ["llama", "gemma3"]))
def test_without_room_for_the_cache_it_runs(tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch):
    path = save_wide(tmp_path / "model.gguf", architecture)
    kept = fingerprint(load_model(path, CPU))
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "full"))
    with monkeypatch.context() as patched:
        patched.setattr(gguf_folder, "write_stored", raising(OSError(28, "No space left on device")))
        with pytest.warns(cache.UnkeptWarning, match=r"cannot be kept in .*full/gguf \(No space left on device\)"):
            lm = load_model(path, CPU)
    assert [x.name for x in (tmp_path / "full" / "gguf").iterdir() if x.is_dir()] == []
    assert fingerprint(lm) == kept
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "file"))
    with pytest.warns(cache.UnkeptWarning, match="Not a directory"):
        assert load_tokenizer(path).eos_token is not None


def test_bad_files_are_refused(tmp_path: Path):
    path = Path(save_wide(tmp_path / "model.gguf"))
    content = path.read_bytes()
    (tmp_path / "text.gguf").write_text("no model")
    for source, message in (("text.gguf", "is no GGUF file"), ("none.gguf", "There is no model")):
        with pytest.raises(ForetokenError, match=message):
            load_model(str(tmp_path / source), CPU)
    path.write_bytes(content[: len(content) // 2])
    for read in (lambda: load_model(str(path), CPU), lambda: load_tokenizer(str(path))):
        with pytest.raises(ForetokenError, match="as a GGUF file"):
            read()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done: weights of GGUF files laid out, and the process started that compiles the kernel's loops."""
    done, write = list[str](), packed.write_contents

    def laid_out(*given: Any) -> None:
        done.append("laid out")
        write(*given)

    def started() -> None:
        if "started" not in done:
            done.append("started")

    monkeypatch.setattr(packed, "write_contents", laid_out)
    for module in packed, load:
        monkeypatch.setattr(module, "compile_ahead", started)
    return done


def test_another_process_compiles_before_the_weights_are_laid_out(tmp_path: Path, order: list[str]) -> None:
    path = save_wide(tmp_path / "model.gguf")
    foretoken.load(path)
    assert order == ["started", "laid out"]
    order.clear()
    foretoken.load(path)
    assert order == ["started"]
    order.clear()
    load_model(save_wide(tmp_path / "other.gguf"), CPU)
    assert order == ["started", "laid out"]
    order.clear()
    gguf_zoo.wide().save_pretrained(tmp_path / "folder")
    drafter = save_wide(tmp_path / "drafter.gguf")
    foretoken.load(tmp_path / "folder", drafter=drafter, tokenizer=path)
    assert order == ["started", "laid out"]


def test_no_other_process_compiles_where_the_kernel_does_not_run(tmp_path: Path, order: list[str]) -> None:
    path = save_wide(tmp_path / "model.gguf")
    load_tokenizer(path)
    foretoken.load(path, compile="off")
    load.lay_out_ahead(path, torch.device("cuda"), None, "auto")
    assert order == ["laid out"]


@pytest.mark.parametrize(
    ("named", "kept", "gpu", "early"),
    [
        ({}, False, False, True),
        ({}, True, False, False),
        ({}, False, True, False),
        ({"device": "cpu"}, False, True, True),
        ({"device": "cuda"}, False, True, False),
        ({"compile": "off"}, False, False, False),
    ],
)
def test_the_first_start_on_a_machine_compiles_while_torch_is_imported(
    home: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], kept: bool, gpu: bool, early: bool
) -> None:
    done = list[str]()
    monkeypatch.setattr(compile, "compile_ahead", lambda: done.append("started"))
    monkeypatch.setattr(options, "check_models", Mock())  # which would look for a GPU
    monkeypatch.setattr(names, "GPU_FILES", ("/",) if gpu else ())
    monkeypatch.setattr(foretoken, "load", Mock(side_effect=ForetokenError("reached")))
    for folder in ["models", "gguf"] if kept else ["models"]:
        (home / folder).mkdir(parents=True)
    with pytest.raises(ForetokenError, match="reached"):
        options.load_engine(None, None, **named)
    assert done == ["started"] * early


def test_what_is_kept_where_nobody_may_look_is_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "gguf").mkdir(parents=True)
    assert not cache.nothing_kept()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", Mock(side_effect=PermissionError))
        assert cache.nothing_kept()


def test_a_wrong_option_starts_no_process_at_the_first_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "GPU_FILES", ())
    monkeypatch.setattr(compile, "compile_ahead", lambda: pytest.fail("a process was started"))
    with pytest.raises(ForetokenError, match="Unknown tree"):
        options.load_engine(None, None, tree="bush")


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_no_other_process_compiles_for_a_damaged_file(tmp_path: Path, order: list[str], dtype: str | None) -> None:
    path = Path(save_wide(tmp_path / "model.gguf"))
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight")):
        path.write_bytes(damaged)
        with pytest.raises(ForetokenError):
            foretoken.load(path, dtype=dtype)
        with pytest.raises(ForetokenError):
            load_model(str(path), CPU, load.choose_dtype(dtype))
    assert order == []


def test_rows_that_fill_no_blocks_of_q4_k_get_q4_1(tmp_path: Path) -> None:
    gguf_zoo.model("llama", hidden_size=96, intermediate_size=256).save_pretrained(tmp_path / "folder")
    lm = load_model(str(tmp_path / "folder"), CPU, quantise="q4_k")
    kinds = {name.split(".")[-1]: x.kind for name, x in lm.model.named_modules() if isinstance(x, PackedLinear)}
    assert (kinds["q_proj"], kinds["down_proj"], kinds["lm_head"]) == ("q4_1", "q4_k", "q8_0")


def test_bytes_say_nothing_of_the_time_of_a_mixture_of_experts_and_where_the_target_alone_is_quantised(
    tmp_path: Path,
) -> None:
    gguf_zoo.wide().save_pretrained(tmp_path)
    whole, packed = load_model(str(tmp_path), CPU), load_model(str(tmp_path), CPU, quantise="q8_0")
    experts = load.wrap_model(models_zoo.tiny("olmoe"))
    assert (share_read(whole, whole), share_read(packed, packed)) == (1, 1)
    assert (share_read(whole, packed), share_read(experts, experts)) == (0, 0)
    assert 0.5 < share_read(packed, whole) < 0.6  # a draft token takes at least this share of the time


def test_the_bytes_that_a_token_reads_are_found_wherever_they_are() -> None:
    model = models_zoo.tiny("gemma2")
    every = sum(weight.nbytes for weight in model.parameters())
    assert _bytes_read(model) == every  # the LM head is the embedding
    up = model.model.layers[0].mlp.up_proj
    weight = up.weight
    del up.weight
    up.register_buffer("qweight", weight.data)  # as GPTQ has it
    assert _bytes_read(model) == every
    assert _bytes_read(model.to("meta")) == every  # where weights have no address


def test_a_file_is_not_quantised_once_more(tmp_path: Path) -> None:
    save_wide(tmp_path / "model.gguf", kind=TYPES.F16)
    said = r"^quantise q8_0 is for the weights in a model's folder, and .*model\.gguf is a GGUF file, .*: leave it out"
    with pytest.raises(ForetokenError, match=said):
        foretoken.load(tmp_path / "model.gguf", quantise="q8_0")
    with pytest.raises(ForetokenError, match=said):
        check_engine(str(tmp_path / "model.gguf"), quantise="q8_0")


def test_what_is_used_at_every_forward_is_read_ahead_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an embedding few rows are used: its other pages, and other models' files, must not fill the memory."""
    ahead: list[int] = []
    monkeypatch.setattr(kept_model, "read_ahead", lambda weights: ahead.extend(weight.data_ptr() for weight in weights))
    path = save_wide(tmp_path / "model.gguf")
    load_model(path, CPU)  # which makes the kept folder, and reads it
    lm = load_model(path, CPU)
    layers = [module for module in lm.model.modules() if isinstance(module, PackedLinear)]
    assert layers
    assert sorted(ahead[-len(layers) :]) == sorted(layer.panels.data_ptr() for layer in layers)


KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


def test_other_mapped_files_may_have_any_name(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/w\xe8.bin"
    with open(path, "w+b") as file:
        file.write(b"12")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert b"/w\xe8.bin" in Path("/proc/self/maps").read_bytes()
            weight_files()


@pytest.mark.skipif(not sys.platform.startswith("linux") or KERNEL < (5, 14), reason="Linux has it from 5.14 on")
def test_a_mapped_file_is_brought_into_memory_before_its_first_use(tmp_path: Path) -> None:
    """All pages of it are the process's own, although nothing has read them."""
    save_file({"w": torch.ones(1 << 21)}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        weight = file.get_tensor("w")

    def resident() -> int:
        """Kilobytes."""
        maps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "w.safetensors"), 1)[1]
        return int(re.search(r"^Rss: +(\d+) kB", maps, re.MULTILINE)[1])

    assert resident() < 1024
    read_ahead([weight])
    wait_until(lambda: resident() >= weight.nbytes // 1024)
