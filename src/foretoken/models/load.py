"""Hugging Face folders and ids -> models and tokenizers; what is wrong with them is said in one sentence."""

import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as HFModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretoken.core.errors import ForetokenError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.folder import check_weights
from foretoken.models.llama_kernel import LlamaKernel
from foretoken.models.mapped import weight_files
from foretoken.models.named import AUTO, OFF, ON, check_dtype, is_gguf, located
from foretoken.models.packed import dequantised_model, few, packed_model, stored_tokenizer
from foretoken.models.panels import PackedLinear, PanelLinear, pack
from foretoken.models.quantised import pack_quantised, quantised_model
from foretoken.models.text import Tokenizer

BLOCK = 32  # rows of multiples of so many weights are quantised, whatever the kind


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, else the first accelerator, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # "meta" has no values
    except (RuntimeError, AssertionError) as error:
        able = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ForetokenError(
            f"Device {device} cannot be used: torch finds {', '.join(able) or 'no CUDA device'} here; choose "
            f"{' or '.join(['cpu', *able])}."
        ) from error
    return chosen


def choose_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that was named; None stands for the checkpoint's own."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    check_dtype(dtype)
    return getattr(torch, dtype)


def load_model(
    source: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    compile: str = AUTO,
    quantise: str | None = None,
) -> CausalLM:
    """The causal LM in a folder or a GGUF file, ready for inference.

    Args:
        source: the folder, the file, a hub id, or the short name of a model that `foretoken fetch` brought.
        dtype: what it computes in; None stands for the checkpoint's own dtype. A checkpoint in float16 runs in float32
            on a CPU then, which holds all of its values: processors have no units for float16, and no kernel of ours.
            The weights of a GGUF file stay packed on a CPU then; in a dtype that is named they are dequantised.
        compile, quantise: see `foretoken.load`.

    Raises:
        ForetokenError: naming what is wrong with the folder, its configuration or its weights.
    """
    source = located(source)
    check_weights(source)
    on_cpu = device.type == "cpu"
    check_runs_quantised(quantise, device, compile)
    # As they are stored they need no memory of their own until they are laid out; float32 holds the values of all.
    stored = dtype is None or (on_cpu and compile != OFF and dtype == torch.float32)
    if is_gguf(source):
        whole = dtype is None and on_cpu and compile != OFF
        model = packed_model(source) if whole else dequantised_model(source, dtype or torch.bfloat16)
    elif quantise is not None:
        model = _quantised(source, quantise, trust_remote_code)
        if not _has_packed_layers(model):
            raise ForetokenError(
                f"The weights in {source} cannot be quantised to {quantise}: its layers have no nn.Linear with rows of "
                f"multiples of {BLOCK} weights. Leave that option out."
            )
    else:
        model = _pretrained(source, dtype if dtype is not None and not stored else "auto", trust_remote_code)
    if dtype is None:
        dtype = torch.float32 if on_cpu and model.dtype == torch.float16 else model.dtype
    model = cast(HFModel, torch.nn.Module.to(model, device)).eval()
    if compile != OFF:
        pack(model, dtype, weight_files())
    elif model.dtype != dtype:
        torch.nn.Module.to(model, dtype)
    return CausalLM(model, source, _traced(compile, device), compiled=compile == ON)


def _traced(compile: str, device: torch.device) -> bool:
    """Whether forwards of fixed shapes are compiled, or recorded, which takes a GPU but a moment."""
    return compile == ON or (compile == AUTO and device.type == "cuda")


def check_runs_quantised(kind: str | None, device: torch.device, compile: str) -> None:
    """Refuse to quantise weights where nothing runs them.

    kind: of the blocks; None: nothing is quantised. device: where they are to run. compile: see `foretoken.load`.
    Raises ForetokenError on other devices than CPUs, and for plain torch.
    """
    if kind is not None and (device.type != "cpu" or compile == OFF):
        raise ForetokenError(f"Weights are quantised to {kind} on a CPU alone, and not with compile off.")


def drafts_itself(target: CausalLM, source: str | HFModel) -> bool:
    """Whether `load_own` takes a target, and its weights are of 16 or 32 bits, so that fewer bits are read faster."""
    if not isinstance(target.backend, LlamaKernel) or not isinstance(source, str):
        return False
    linears = [module for module in target.model.model.layers.modules() if isinstance(module, PanelLinear)]
    fits = any(layer.in_features % BLOCK == 0 for layer in linears)
    return fits and not any(isinstance(layer, PackedLinear) for layer in linears)


def load_own(target: CausalLM, source: str | HFModel, kind: str, trust_remote_code: bool = False) -> CausalLM:
    """The weights of a target once more, quantised, to draft in its slot cache.

    source: what the target was loaded from. kind: of the blocks, see `pack_quantised`.
    Raises ForetokenError for a target that is a model object, or that our kernel does not run.
    """
    if not isinstance(source, str):
        raise ForetokenError(
            f"Drafter self reads the target's weights once more, and {target.name} is a model object: load it by its "
            'folder or file, as foretoken.load(FOLDER, drafter="self"), or choose drafter ngram, which fits every '
            "model."
        )
    if not isinstance(target.backend, LlamaKernel):
        raise ForetokenError(
            f"Drafter self needs a target that our CPU kernel runs, and {target.name} runs by {target.execution}: "
            "choose drafter ngram, which fits every model."
        )
    model: Any = _quantised(located(source), kind, trust_remote_code)
    if not _has_packed_layers(model):
        raise ForetokenError(
            f"Drafter self packs rows of multiples of {BLOCK} weights, and the layers of {target.name} have none: "
            "choose drafter ngram."
        )
    model.model.embed_tokens = torch.nn.Identity()  # whose place the target's embedding takes, as it is
    pack(model.eval(), torch.float32, weight_files())  # what is left: its rows are not rounded where others are not
    model.model.embed_tokens = target.model.get_input_embeddings()
    return for_drafting(CausalLM(model, name=f"{target.name} in {kind}"))


def for_drafting(lm: CausalLM) -> CausalLM:
    """The same model, whose LM head and cache may be read by fewer bits, as a drafter's may."""
    if isinstance(lm.backend, LlamaKernel):
        lm.backend.screen_head()  # after the probe, which compares with all bits
        lm.backend.halve_cache()
    return lm


def load_frozen(source: str, device: torch.device, dtype: torch.dtype | None = None) -> CausalLM:
    """The same with plain weights, through which gradients flow to what stands before them; on a CPU in float32 unless
    a dtype is named, since plain torch is slow in 16 bits there."""
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    lm = load_model(source, device, dtype, compile=OFF)
    lm.model.requires_grad_(False)
    return lm


def _quantised(source: str, kind: str, trust_remote_code: bool) -> HFModel:
    """What `located` gave, its linear layers quantised to a kind of blocks."""

    def load() -> HFModel:
        if is_gguf(source):
            return dequantised_model(source, torch.bfloat16)
        return _pretrained(source, "auto", trust_remote_code)

    if trust_remote_code:  # what is kept is read without the code that comes with a checkpoint
        return pack_quantised(load(), kind)
    model = quantised_model(Path(source), kind, load)
    model.config.name_or_path = source  # which names the folder of what is kept, where it was read from there
    return model


def _has_packed_layers(model: HFModel) -> bool:
    """Whether more than the LM head is quantised."""
    last = model.get_output_embeddings()
    return any(isinstance(module, PackedLinear) and module is not last for module in model.modules())


def _pretrained(source: str, dtype: torch.dtype | str, trust_remote_code: bool) -> HFModel:
    """The model as transformers loads it, all of whose weights come from the checkpoint.

    Raises ForetokenError where transformers would go on with weights of its own making: where the checkpoint lacks some
    or has them in another shape. Weights that the model has no use for are let pass, since good checkpoints carry some
    (frequencies that are computed today, parts for other uses); but not those of further layers, which only a wrong
    configuration leaves out.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            local_files_only=Path(source).is_dir(),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
        )
    except Exception as error:  # weights and configurations fail in as many ways as there are formats
        raise ForetokenError(f"Cannot load a causal language model from {source}: {_first_line(error)}") from error
    model, info = loaded
    if info["mismatched_keys"]:
        found = [f"{key} is {list(has)}, not {list(wants)}" for key, has, wants in sorted(info["mismatched_keys"])]
        raise ForetokenError(f"The weights in {source} do not fit its config.json: {few(found)}. Mend either.")
    if info["missing_keys"]:
        raise ForetokenError(
            f"The weights in {source} lack {few(sorted(info['missing_keys']))}, which its config.json asks for: "
            "complete them or mend config.json."
        )
    own = {_LAYER.sub(".0.", key) for key in model.state_dict()}
    further = sorted(key for key in info["unexpected_keys"] if _LAYER.search(key) and _LAYER.sub(".0.", key) in own)
    if further:
        raise ForetokenError(
            f"The weights in {source} have {few(further)}, further layers than its config.json tells of: mend it."
        )
    return model


_LAYER = re.compile(r"\.\d+\.")


def wrap_model(model: HFModel, compile: str = AUTO) -> CausalLM:
    """A caller's own model, used as it is and never modified."""
    return CausalLM(model, traced=_traced(compile, model.device), compiled=compile == ON)


def load_tokenizer(source: str, trust_remote_code: bool = False) -> Tokenizer:
    source = located(source)
    if is_gguf(source):
        return stored_tokenizer(source)
    if Path(source).is_dir() and not any(Path(source).glob("*token*")) and not any(Path(source).glob("*.model")):
        raise ForetokenError(f"Folder {source} has no tokenizer: save one there, or name a folder that has one.")
    try:
        return AutoTokenizer.from_pretrained(
            source, local_files_only=Path(source).is_dir(), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizer files fail in as many ways as there are formats
        raise ForetokenError(f"Cannot load a tokenizer from {source}: {_first_line(error)}") from error


def eos_ids(lm: CausalLM, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a text: those of the model's generation config, else of its tokenizer."""
    config = getattr(lm.model, "generation_config", None)
    ids: int | list[int] | None = getattr(config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = cast(int | None, tokenizer.eos_token_id)
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def generation_output(ids: Tensor, as_dict: bool) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns: ids [b, t] int64, or its output object around them."""
    return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids)) if as_dict else ids


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
