"""A GGUF model starts without transformers' modelling code, and is the model that this code would have made."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import foretoken
import gguf_zoo
from foretoken.catalogue import kept as cache
from foretoken.core.errors import ForetokenError
from foretoken.models import packed, panels, skeleton
from foretoken.models.causal_lm import CausalLM
from foretoken.models.identity import fingerprint
from foretoken.models.llama_kernel import LlamaKernel
from foretoken.models.load import load_model
from foretoken.models.parts import parts
from foretoken.models.skeleton import Skeleton

CPU = torch.device("cpu")
TYPES = gguf.GGMLQuantizationType
IDS = torch.arange(9)[None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_HOME", str(tmp_path / "home"))


def save(
    path: Path, architecture: str = "llama", kind: TYPES = TYPES.Q8_0, tied: bool = True, head_dim: int = 64
) -> str:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    if architecture in ("qwen3", "gemma3"):
        sizes["head_dim"] = head_dim
    if architecture == "llama":
        scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
        sizes["rope_parameters"] = scaled | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    gguf_zoo.save(gguf_zoo.model(architecture, tied=tied, **sizes), architecture, path, kind)
    return str(path)


def made_by_transformers(path: str, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """The model of the same file that is read without a skeleton."""
    with monkeypatch.context() as patched:
        patched.setattr(packed, "read_skeleton", lambda folder, make: None)
        return load_model(path, CPU)


def logits(lm: CausalLM) -> torch.Tensor:
    rows = lm.open(1, IDS.shape[1])
    rows.join()
    (scores,) = rows.score(IDS.tolist(), [list(range(-1, IDS.shape[1] - 1))])
    return scores.clone()


@pytest.mark.parametrize("kind", [TYPES.Q4_K, TYPES.Q8_0, TYPES.F32])
@pytest.mark.parametrize("architecture", gguf_zoo.ARCHITECTURES)
def test_a_skeleton_is_the_model_that_transformers_makes(
    tmp_path: Path, architecture: str, kind: TYPES, monkeypatch: pytest.MonkeyPatch
):
    path = save(tmp_path / "model.gguf", architecture, kind, tied=kind != TYPES.Q8_0)
    lm, whole = load_model(path, CPU), made_by_transformers(path, monkeypatch)
    assert lm.execution == whole.execution == "kernel"
    has_code = (architecture, kind) == ("gemma3", TYPES.F32)  # its embedding, which is not packed
    assert isinstance(lm.weights, Skeleton) == (not has_code)
    assert not isinstance(whole.weights, Skeleton)
    assert fingerprint(lm) == fingerprint(whole)
    assert (lm.dtype, lm.vocab_size, lm.context, lm.num_layers, lm.hidden_size, lm.quantised) == (
        whole.dtype, whole.vocab_size, whole.context, whole.num_layers, whole.hidden_size, whole.quantised,
    )  # fmt: skip
    assert torch.equal(logits(lm), logits(whole))
    assert isinstance(lm.backend, LlamaKernel)
    assert isinstance(whole.backend, LlamaKernel)
    read = zip(lm.backend.weights._fields, lm.backend.weights, whole.backend.weights, strict=True)
    for name, of_skeleton, of_whole in read:
        if name != "weights":  # addresses
            np.testing.assert_array_equal(of_skeleton, of_whole, name)
    modules = ("embedding", "unembedding", "rotary")
    borrowed = [{name: x for name, x in vars(parts(each)).items() if name not in modules} for each in (lm, whole)]
    assert borrowed[0] == borrowed[1]
    own, theirs = lm.weights.config, whole.weights.config
    assert own.to_diff_dict() == theirs.to_diff_dict()
    assert lm.weights.generation_config.to_dict() == whole.weights.generation_config.to_dict()


def test_the_whole_model_has_the_same_weights_in_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(tmp_path / "model.gguf", "qwen2")
    lm, whole = load_model(path, CPU), made_by_transformers(path, monkeypatch)
    assert type(lm.model) is type(whole.model)
    assert lm.model is lm.model
    assert lm.model.get_input_embeddings() is lm.weights.get_input_embeddings()
    assert lm.model.get_output_embeddings() is lm.weights.get_output_embeddings()
    own = dict(lm.weights.named_parameters())
    assert all(own[name] is weight for name, weight in lm.model.named_parameters())
    with torch.inference_mode():
        assert torch.equal(lm.model(IDS).logits, whole.model(IDS).logits)


def test_where_the_kernel_does_not_run_the_model_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the first start on, or on another machine."""
    narrow = load_model(save(tmp_path / "narrow.gguf", "qwen3", head_dim=40), CPU)
    assert narrow.execution == "panels"
    assert not isinstance(narrow.weights, Skeleton)
    path = save(tmp_path / "model.gguf", kind=TYPES.F32)
    wanted = logits(load_model(path, CPU))
    monkeypatch.setattr(panels, "_works", lambda: False)
    lm = load_model(path, CPU)
    assert lm.execution == "modules"
    assert not isinstance(lm.weights, Skeleton)
    torch.testing.assert_close(logits(lm), wanted, rtol=1e-3, atol=1e-3)


def test_scores_are_held_against_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They were written when transformers made the model, and are compared at each start."""
    path = save(tmp_path / "model.gguf")
    load_model(path, CPU)
    read = skeleton.load_file

    def others(file: Path) -> dict[str, torch.Tensor]:
        tensors = read(file)
        return tensors | {skeleton.PROBE: tensors[skeleton.PROBE].roll(1)}

    monkeypatch.setattr(skeleton, "load_file", others)
    with pytest.raises(ForetokenError, match="otherwise than transformers' own forward"):
        load_model(path, CPU)


def test_another_version_of_transformers_makes_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, made = save(tmp_path / "model.gguf"), []
    write = packed.write_skeleton
    monkeypatch.setattr(packed, "write_skeleton", lambda *given: (made.append(0), write(*given)))
    for version, count in (("1", 1), ("1", 1), ("2", 2)):
        monkeypatch.setattr(cache, "version", lambda name, version=version: version)
        load_model(path, CPU)
        assert len(made) == count


PROGRAM = """
import sys
import foretoken
engine = foretoken.load(sys.argv[1], drafter="ngram", method="auto")
assert engine.generate("the cat", max_new_tokens=8, temperature=0.0).text
print(sorted({"transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor"} & set(sys.modules)))
"""


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_second_start_imports_no_modelling_code(tmp_path: Path, architecture: str):
    path = save(tmp_path / "model.gguf", architecture)
    foretoken.load(path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
