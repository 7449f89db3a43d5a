"""A GGUF model starts without transformers' modelling code, and is the model that this code would have made."""

import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import foretoken
from foretoken.catalogue.kept import UnkeptWarning
from foretoken.core.errors import ForetokenError
from foretoken.models import causal_lm, kept_model, packed, panels, skeleton
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint
from foretoken.models.llama_kernel import LlamaKernel
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.parts import parts
from foretoken.models.skeleton import Skeleton
from gguf_zoo import save_wide
from raising import raising
from thinning import one_in

CPU = torch.device("cpu")
TYPES = gguf.GGMLQuantizationType
IDS = torch.arange(9)[None]


pytestmark = pytest.mark.usefixtures("home")


def made_by_transformers(path: str, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """The model of the same file that is read without a skeleton."""
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", packed.DequantisedWarning)
        patched.setattr(kept_model, "read_skeleton", lambda folder: None)
        return load_model(path, CPU)


def logits(lm: CausalLM) -> torch.Tensor:
    rows = lm.open(1, IDS.shape[1])
    rows.join()
    (scores,) = rows.score(IDS.tolist(), [list(range(-1, IDS.shape[1] - 1))])
    return scores.clone()


KINDS = (TYPES.Q4_K, TYPES.Q8_0, TYPES.Q2_K, TYPES.BF16, TYPES.F32)
OTHERS = ("qwen2", "qwen3", "qwen3moe", "phi3", "smollm3", "granite", "seed_oss", "lfm2")
MADE = [
    *((architecture, kind, kind != TYPES.Q8_0) for architecture in ("llama", "gemma3") for kind in KINDS),
    *((name, *case) for name in OTHERS for case in ((TYPES.Q4_K, False), (TYPES.BF16, True))),
    *(("gemma", kind, True) for kind in (TYPES.F32, TYPES.Q8_0)),
]


@pytest.mark.parametrize(("architecture", "kind", "tied"), one_in(7, MADE))
def test_a_skeleton_is_the_model_that_transformers_makes(
    tmp_path: Path, architecture: str, kind: TYPES, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    """Q2_K is dequantised, which a warning says at each start."""
    path = save_wide(tmp_path / "model.gguf", architecture, kind, tied=tied)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_model(path, CPU)
        said.clear()
        lm = load_model(path, CPU)
    assert [each.category for each in said] == [packed.DequantisedWarning] * (kind == TYPES.Q2_K)
    whole = made_by_transformers(path, monkeypatch)
    assert lm.execution == whole.execution == "kernel"
    # An embedding of its own, if it is not packed.
    has_code = architecture.startswith("gemma") and kind not in (TYPES.Q4_K, TYPES.Q8_0)
    assert isinstance(lm.weights, Skeleton) == (not has_code)
    assert not isinstance(whole.weights, Skeleton)
    assert fingerprint(lm) == fingerprint(whole)
    assert (lm.dtype, lm.vocab_size, lm.hidden_size, lm.quantised) == (
        whole.dtype, whole.vocab_size, whole.hidden_size, whole.quantised,
    )  # fmt: skip
    assert about(lm._layout) == about(whole._layout)
    assert torch.equal(logits(lm), logits(whole))
    assert isinstance(lm.backend, LlamaKernel)
    assert isinstance(whole.backend, LlamaKernel)
    for name in lm.backend.records.dtype.names:
        if name not in lm.backend.arrays:  # those are addresses
            np.testing.assert_array_equal(lm.backend.records[name], whole.backend.records[name], name)
    for name, arrays in lm.backend.arrays.items():
        if name != "weights":  # addresses
            for one, other in zip(arrays, whole.backend.arrays[name], strict=True):
                np.testing.assert_array_equal(one, other, name)
    modules = ("embedding", "unembedding")
    borrowed = [{name: x for name, x in vars(parts(each)).items() if name not in modules} for each in (lm, whole)]
    turned = [about(each.pop("rotary")) for each in borrowed]
    assert turned[0] == turned[1]
    assert borrowed[0] == borrowed[1]
    # The whole model is transformers', over the same weights in the same memory.
    assert type(lm.model) is type(whole.model)
    assert lm.model is lm.model
    assert not lm.model.training
    own = {name: weight.data_ptr() for name, weight in lm.weights.named_parameters()}
    assert {name: weight.data_ptr() for name, weight in lm.model.named_parameters()} == own
    assert str(lm.model.config) == str(whole.model.config)
    assert lm.model.config.name_or_path == whole.model.config.name_or_path
    assert str(lm.model.generation_config) == str(lm.weights.generation_config) == str(whole.model.generation_config)
    with torch.inference_mode():
        assert torch.equal(lm.model(IDS).logits, whole.model(IDS).logits)


def about(made: object) -> dict[str, Any]:
    """The fields of a dataclass, tensors among them as lists."""
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in vars(made).items()}


def test_where_the_kernel_does_not_run_the_model_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the first start on, or on another machine."""
    narrow = load_model(save_wide(tmp_path / "narrow.gguf", "qwen3", head_dim=40), CPU)
    assert narrow.execution == "panels"
    assert not isinstance(narrow.weights, Skeleton)
    path = save_wide(tmp_path / "model.gguf", kind=TYPES.F32)
    wanted = logits(load_model(path, CPU))
    monkeypatch.setattr(panels, "_works", lambda: False)
    lm = load_model(path, CPU)
    assert lm.execution == "modules"
    assert not isinstance(lm.weights, Skeleton)
    torch.testing.assert_close(logits(lm), wanted, rtol=1e-3, atol=1e-3)


def test_scores_are_held_against_those_of_transformers_before_it_is_kept(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is read again of what was written is compared, and nothing is kept that differs."""
    path = save_wide(tmp_path / "model.gguf")
    read = skeleton.load_file

    def others(file: Path) -> dict[str, torch.Tensor]:
        tensors = read(file)
        return tensors | {skeleton.PROBE: tensors[skeleton.PROBE].roll(1)}

    with monkeypatch.context() as patched:
        patched.setattr(skeleton, "load_file", others)
        for _ in range(2):
            with pytest.raises(ForetokenError, match="otherwise than transformers' own forward"):
                load_model(path, CPU)
            assert list((home / "skeletons").glob("*/*/*")) == []
    assert isinstance(load_model(path, CPU).weights, Skeleton)


def test_a_model_is_probed_once_per_file_code_and_processor(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    path, probed = save_wide(tmp_path / "model.gguf"), list[str]()
    check = causal_lm.check_probe

    def starts(*times: int, kept: bool = True) -> None:
        for wanted in times:
            assert isinstance(load_model(path, CPU).weights, Skeleton) == kept
            assert len(probed) == wanted
            probed.clear()

    monkeypatch.setattr(causal_lm, "check_probe", lambda *given: (probed.append(""), check(*given)))
    starts(1, 0, 0)
    with monkeypatch.context() as patched:
        patched.setattr(kept_model, "_what_runs", lambda: "another")  # code of another version, or processor
        starts(1, 0)
    starts(0)  # both are kept
    save_wide(tmp_path / "model.gguf", "llama")
    starts(1, 0)
    # One that is not kept is made by transformers and probed each time.
    monkeypatch.setattr(kept_model, "write_skeleton", raising(OSError(28, "No space left on device")))
    shutil.rmtree(home / "skeletons")
    with pytest.warns(UnkeptWarning, match="No space left on device"):
        starts(1, 1, kept=False)
    assert list((home / "skeletons").glob("*/*/*")) == []


@pytest.mark.parametrize("part", ["kernel/tile.py", "models/llama_kernel.py"])
def test_what_runs_a_model_changes_with_the_code(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("kernel", "models"):
        shutil.copytree(Path(foretoken.__path__[0]) / name, tmp_path / name)
        monkeypatch.setattr(getattr(kept_model, name), "__path__", [str(tmp_path / name)])
    before = kept_model._what_runs.__wrapped__()
    assert before == kept_model._what_runs.__wrapped__() == kept_model._what_runs()
    with (tmp_path / part).open("a") as file:
        file.write("# another line\n")
    assert kept_model._what_runs.__wrapped__() != before
    monkeypatch.setattr(kept_model, "FEATURES", ["+avx2"])
    assert kept_model._what_runs.__wrapped__() != before


def test_another_version_of_transformers_makes_it_anew_and_leaves_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, made = save_wide(tmp_path / "model.gguf"), list[str]()
    for module, name in ((kept_model, "write_skeleton"), (packed, "write_contents")):
        monkeypatch.setattr(module, name, partial(noted, made, name, getattr(module, name)))
    for version, done in (("1", ["write_contents", "write_skeleton"]), ("1", []), ("2", ["write_skeleton"]), ("1", [])):
        monkeypatch.setattr(kept_model, "version", lambda name, version=version: version)
        load_model(path, CPU)
        assert made == done
        made.clear()


@pytest.mark.long
def test_a_new_skeleton_replaces_those_of_its_model_that_were_not_used_for_a_month(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    path, another = save_wide(tmp_path / "model.gguf"), save_wide(tmp_path / "another.gguf")

    def start(version: str, path: str = path) -> None:
        monkeypatch.setattr(kept_model, "version", lambda name: version)
        load_model(path, CPU)

    def found() -> set[str]:
        return {f"{x.parent.name[0]} {x.name[:5]}" for x in (home / "skeletons").glob("*/[!.]*")}

    start("1")
    start("2")
    start("1", another)
    for entry in (home / "skeletons").glob("*/[!.]*"):
        os.utime(entry, (0, 0))
    start("2")  # which counts as use
    assert found() == {"1 model", "2 model", "1 anoth"}
    start("3")
    assert found() == {"2 model", "3 model", "1 anoth"}


def noted(made: list[str], name: str, call: Callable[..., None], *given: object) -> None:
    made.append(name)
    call(*given)


def test_tokenizers_and_dequantised_models_are_read_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So they are where products with quantised weights are wrong, for which an error names --dtype."""
    path = save_wide(tmp_path / "model.gguf")
    monkeypatch.setattr(panels, "check_quantised", raising(ForetokenError("name a dtype")))
    assert load_tokenizer(path).eos_token == "<|im_end|>"
    assert load_model(path, CPU, torch.float32).execution == "kernel"
    with pytest.raises(ForetokenError, match="name a dtype"):
        load_model(path, CPU)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_wide(tmp_path / "model.gguf")
    monkeypatch.setattr(skeleton, "TENSORS", "/dev/full")
    with pytest.warns(UnkeptWarning, match="No space left on device"):
        load_model(path, CPU)


def test_annotations_name_transformers_models():
    hints = get_type_hints(foretoken.load)
    assert PreTrainedModel in get_args(hints["target"])
