"""Load models and tokenizers from folders, GGUF files and hub ids; errors say in one sentence what is wrong."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.generic import ModelOutput

from foretoken.catalogue.kept import PACKED, can_keep
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_choice, few
from foretoken.core.making import making
from foretoken.kernel.compile import compile_ahead
from foretoken.models.causal_lm import CausalLM
from foretoken.models.folder import CONFIG, WEIGHT_FILES, check_weights, classes_named
from foretoken.models.hf_model import HFModel
from foretoken.models.kept_model import bare_model, computes_in, filled, kept_model, mapped_weights
from foretoken.models.llama_kernel import FAMILY, LlamaKernel
from foretoken.models.named import AS_STORED, AUTO, DRAFTING_KIND, DTYPES, OFF, ON, is_gguf, located
from foretoken.models.packed import dequantised_model, kept_file, packed_model, stored_tokenizer
from foretoken.models.panels import PackedLinear, pack
from foretoken.models.quantised import BLOCK, UnpackableError, kept_quantised, pack_quantised
from foretoken.models.skeleton import Settings, Skeleton, auto_class
from foretoken.models.text import Tokenizer

EMBEDDING = "model.embed_tokens.weight"  # in the models that our kernel runs
NAMED = ("model_type", "model_name", "_name_or_path")  # the entries of a configuration that choose a tokenizer's class


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the `device` that was named; for None CUDA's current GPU, or the CPU where there is no GPU.

    Raises ForetokenError where torch cannot use the device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # "meta" has no values
    except (RuntimeError, AssertionError, TypeError) as error:
        able = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ForetokenError(
            f"Device {device or repr(device)} cannot be used: torch finds {', '.join(able) or 'no CUDA device'} here; "
            f"choose {' or '.join(['cpu', *able])}."
        ) from error
    return chosen


def choose_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype with the name `dtype`, or `dtype` itself where it is one or None. Refuses other names."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    check_choice("dtype", dtype, DTYPES)
    return getattr(torch, dtype)


def load_model(
    source: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    compile: str = AUTO,
    quantise: str | None = None,
) -> CausalLM:
    """Return the causal LM in a folder or a GGUF file, ready for inference.

    source: the folder, the file, a hub id, or the short name of a model that `foretoken fetch` brought.
    device: where it runs.
    dtype: what it computes in; None stands for the checkpoint's own dtype, with three exceptions. A checkpoint in
        float16 runs in float32 on a CPU, which holds all of its values, since processors have no units for float16;
        and so does one of which `quantise` leaves some layers as they are. The weights of a GGUF file stay packed on a
        CPU, but with `compile` off; else they become bfloat16. With a named dtype they are dequantised.
    trust_remote_code: whether to run Python code that comes with the checkpoint.
    compile: "auto", "on" or "off", see `foretoken.load`.
    quantise: the kind of blocks to which linear layers are quantised; None: to none. A GGUF file stays as it is.

    Raises ForetokenError, which names what is wrong with the folder, its configuration or its weights.
    """
    source = located(source)
    check_weights(source)
    check_runs_quantised(quantise, device, compile)
    on_cpu = device.type == "cpu"
    in_panels = on_cpu and compile != OFF
    if in_panels and not is_gguf(source):
        compile_ahead()
    if is_gguf(source):
        whole = _stays_packed(device, dtype, compile)
        model = packed_model(source) if whole else dequantised_model(source, dtype or torch.bfloat16)
        if in_panels:
            compile_ahead()  # where it has not been started yet
    elif quantise is not None:
        model = _quantised(source, quantise, trust_remote_code, as_it_is=dtype is None)
    else:
        # Weights in their stored dtype are views of the mapped file and take no memory of their own until they are laid
        # out anew. That also goes where float32 is named, since it holds all values of the other dtypes.
        read_in = None if in_panels and dtype == torch.float32 else dtype
        load = partial(_pretrained, source, read_in or "auto", trust_remote_code)
        if in_panels and dtype is None and not trust_remote_code and Path(source).is_dir():
            weights = partial(mapped_weights, sorted(Path(source).glob(WEIGHT_FILES)))
            model = kept_model(Path(source), source, load, weights)
        else:  # the hub is asked for changes of a model with an id
            model = load()
    if dtype is None:
        dtype = computes_in(model) if on_cpu else model.dtype
    torch.nn.Module.to(model, device)  # in place
    model.eval()
    if compile != OFF:
        pack(model, dtype)
    elif model.dtype != dtype:
        torch.nn.Module.to(model, dtype)
    return CausalLM(model, source, _traced(compile, device), compiled=compile == ON)


def load_drafter(load: Callable[[str | None], CausalLM], quantise: str | None, by_default: bool) -> CausalLM:
    """Load a model that only drafts, and make it fast for that by `for_drafting`.

    load: loads it with its linear layers quantised to a kind of blocks, or with None as they are.
    quantise: the kind of blocks; AS_STORED leaves the weights as they are; None: what is the default.
    by_default: whether that may be DRAFTING_KIND, see `may_pack_drafter`; it is where our kernel runs the model, in
        half of the time. In transformers' modules the last bit of a row's sums depends on the rows beside it. Rounding
        such sums to 8 bits makes that difference large enough to change a draft token now and then, and with it the
        text of a seed.
    """
    if quantise is None and by_default:
        with suppress(UnpackableError):
            lm = load(DRAFTING_KIND)
            if isinstance(lm.backend, LlamaKernel):
                return for_drafting(lm)
    return for_drafting(load(None if quantise == AS_STORED else quantise))


def may_pack_drafter(
    source: object, device: torch.device, dtype: torch.dtype | None, trust_remote_code: bool, compile: str
) -> bool:
    """Whether a drafter may be quantised where no kind of blocks is named, and kept so for later starts.

    source, device, dtype, trust_remote_code, compile: as in `load_model`; a model object is none that may.
    """
    if not isinstance(source, str) or trust_remote_code or not _stays_packed(device, dtype, compile):
        return False
    return not FAMILY.isdisjoint(classes_named(located(source))) and can_keep()


def _stays_packed(device: torch.device, dtype: torch.dtype | None, compile: str) -> bool:
    """Whether packed weights run as they are, those of a GGUF file too; the arguments are those of `load_model`."""
    return device.type == "cpu" and dtype is None and compile != OFF


def lay_out_ahead(source: object, device: torch.device, dtype: torch.dtype | None, compile: str) -> None:
    """Lay out the weights of a GGUF file that our kernel is to run, while another process compiles the kernel's loops.

    Reading the file's tokenizer would lay them out too, but start no other process.

    source, device, dtype, compile: as in `load_model`; what is not in a GGUF file, or a model object, is let be.

    Raises ForetokenError for a file that cannot be read.
    """
    if isinstance(source, str) and _stays_packed(device, dtype, compile) and is_gguf(found := located(source)):
        kept_file(Path(found), compile_ahead)


def _traced(compile: str, device: torch.device) -> bool:
    """Whether forwards of fixed shapes are compiled or, which takes a GPU only a moment, recorded."""
    return compile == ON or (compile == AUTO and device.type == "cuda")


def check_runs_quantised(kind: str | None, device: torch.device, compile: str) -> None:
    """Raise ForetokenError where weights quantised to `kind` cannot be computed with: on GPUs, and in plain torch.

    kind: the kind of blocks; AS_STORED or None: nothing is to be quantised, and nothing is refused.
    device, compile: as in `load_model`.
    """
    if kind not in (None, AS_STORED) and (device.type != "cpu" or compile == OFF):
        raise ForetokenError(f"Weights are quantised to {kind} on a CPU alone, and not with compile off.")


def drafts_itself(target: CausalLM, source: str | HFModel) -> bool:
    """Whether `load_own` takes the `target` from `source`, and has something to gain: no layer is quantised yet."""
    if not isinstance(target.backend, LlamaKernel) or not isinstance(source, str):
        return False
    linears = target.backend.linears
    fits = any(layer.in_features % BLOCK == 0 for layer in linears)
    return fits and not any(isinstance(layer, PackedLinear) for layer in linears)


def load_own(target: CausalLM, source: str | HFModel, kind: str, trust_remote_code: bool = False) -> CausalLM:
    """Load the weights of a target once more, quantised, as a model that drafts in the target's slot cache.

    target: the loaded model, whose embedding the drafter shares.
    source: the folder, file or id that it was loaded from, or the caller's model object.
    kind: the kind of blocks, see `pack_quantised`.
    trust_remote_code: whether to run Python code that comes with the checkpoint.

    Raises ForetokenError for a model object, for a model that our kernel does not run, and if no layer can be packed.
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
    try:
        model: Any = _own_quantised(target, located(source), kind, trust_remote_code)
    except UnpackableError as error:
        raise ForetokenError(
            f"Drafter self packs rows of multiples of {BLOCK} weights, and the layers of {target.name} have none: "
            "choose drafter ngram."
        ) from error
    model.model.embed_tokens = torch.nn.Identity()  # `pack` is not to convert it: the target's takes its place
    pack(model.eval(), torch.float32)  # other layers; the kernel mixes no bfloat16 with quantised ones
    model.model.embed_tokens = target.weights.get_input_embeddings()
    return for_drafting(CausalLM(model, name=f"{target.name} in {kind}"))


def for_drafting(lm: CausalLM) -> CausalLM:
    """Return `lm` itself, after its LM head and its future caches were made faster and less exact, for drafting alone.

    Only a model that our kernel runs changes, by `LlamaKernel.screen_head` and `halve_cache`.
    """
    if isinstance(lm.backend, LlamaKernel):
        lm.backend.screen_head()  # only now, since the probe compares exact logits
        lm.backend.halve_cache()
    return lm


def load_frozen(source: str, device: torch.device, dtype: torch.dtype | None = None) -> CausalLM:
    """Load a causal LM with plain torch weights that take no gradients; gradients can flow through them to its inputs.

    source, device, dtype: as in `load_model`, but for a dtype of None. On a CPU, where plain torch is slow in 16 bits,
        it is float32, and on a GPU that of the checkpoint.
    """
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    lm = load_model(source, device, dtype, compile=OFF)
    lm.model.requires_grad_(False)
    return lm


def _quantised(source: str, kind: str, trust_remote_code: bool, as_it_is: bool) -> HFModel | Skeleton:
    """Return the model that `located` found, its linear layers quantised to a kind of blocks.

    as_it_is: whether it is used so, in no other dtype and with all of its weights; a skeleton will do then.
    """
    load = partial(_checkpoint, source, trust_remote_code)
    if trust_remote_code:  # nothing is kept on disk: it would be read without the checkpoint's code
        return pack_quantised(load(), kind)
    folder = kept_quantised(source, kind, load)
    if not isinstance(folder, Path):
        folder.config.name_or_path = source
        return folder
    make, weights = partial(bare_model, folder), partial(mapped_weights, [folder / PACKED])
    if as_it_is:
        return kept_model(folder, source, make, weights)
    model = filled(make(), weights())
    model.config.name_or_path = source
    return model


def _checkpoint(source: str, trust_remote_code: bool) -> HFModel:
    """Return the model that `located` found, to be quantised."""
    if is_gguf(source):
        return dequantised_model(source, torch.bfloat16)
    return _pretrained(source, "auto", trust_remote_code)


def _own_quantised(target: CausalLM, source: str, kind: str, trust_remote_code: bool) -> HFModel | Skeleton:
    """Return the model of a target once more, its linear layers quantised; by its skeleton where it has one.

    A skeleton gets no embedding. It counts as probed, as it was with the target's weights: drafts are only guesses.
    """
    if not isinstance(target.weights, Skeleton):
        return _quantised(source, kind, trust_remote_code, as_it_is=False)
    found = kept_quantised(source, kind, partial(_checkpoint, source, trust_remote_code))
    if not isinstance(found, Path):
        return found
    model, weights = target.weights.without_weights(), mapped_weights([found / PACKED])
    model.dtype, model.probed = torch.float32, True
    return filled(model, {name: each for name, each in weights.items() if name != EMBEDDING})


def _pretrained(source: str, dtype: torch.dtype | str, trust_remote_code: bool) -> HFModel:
    """Return the model as transformers loads it; all of its weights come from the checkpoint.

    Raises ForetokenError where transformers would go on with random weights: where the checkpoint lacks some or has
    them in another shape. Weights that the model does not use are ignored, since good checkpoints have some (rotary
    frequencies that are computed today, parts for other uses). But those of further layers are refused, since only a
    wrong configuration leaves them out.
    """
    from transformers import AutoConfig  # takes seconds

    where = {"local_files_only": Path(source).is_dir(), "trust_remote_code": trust_remote_code}
    try:
        with making:
            loaded: Any = auto_class(AutoConfig.from_pretrained(source, **where)).from_pretrained(
                source,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **where,
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


def check_object(model: torch.nn.Module) -> None:
    """Raise ForetokenError for a caller's `model` that is no transformers model itself, as a wrapper of one is not."""
    from transformers import PreTrainedModel  # a transformers model's class has imported it

    if not isinstance(model, PreTrainedModel):
        raise ForetokenError(
            f"{type(model).__name__} is no transformers model: give the model that it wraps; of a peft model with LoRA "
            "adapters that is get_base_model(), in which they stay active."
        )


def wrap_model(model: HFModel, compile: str = AUTO) -> CausalLM:
    """Return a `CausalLM` of a caller's own `model`, which is never modified; compile: see `foretoken.load`."""
    return CausalLM(model, traced=_traced(compile, model.device), compiled=compile == ON)


def load_tokenizer(source: str, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer of a model.

    source: as in `load_model`.
    trust_remote_code: whether to run Python code that comes with the tokenizer.

    Raises ForetokenError where there is none or it cannot be loaded.
    """
    source = located(source)
    if is_gguf(source):
        return stored_tokenizer(source)
    if Path(source).is_dir() and not any(Path(source).glob("*token*")) and not any(Path(source).glob("*.model")):
        raise ForetokenError(f"Folder {source} has no tokenizer: save one there, or name a folder that has one.")
    from transformers import AutoTokenizer  # takes half a second

    try:
        return AutoTokenizer.from_pretrained(
            source,
            config=_config_of_any_class(source),
            local_files_only=Path(source).is_dir(),
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # tokenizer files fail in as many ways as there are formats
        raise ForetokenError(f"Cannot load a tokenizer from {source}: {_first_line(error)}") from error


def named_tokenizer(
    named: str | Tokenizer | None, model: str | HFModel | None, trust_remote_code: bool
) -> Tokenizer | None:
    """Return the tokenizer that was named, else that of a model named by its folder; None where neither is.

    named: the tokenizer, or the name or path of a model that has one.
    model: the model or its name.
    trust_remote_code: as in `load_tokenizer`.
    """
    if isinstance(named, str) or (named is None and isinstance(model, str)):
        return load_tokenizer(str(named or model), trust_remote_code)
    if named is not None and not (callable(named) and hasattr(named, "decode")):
        raise ForetokenError(f"The tokenizer is {named!r}: give a tokenizer, or the path of a model that has one.")
    return named


def _config_of_any_class(source: str) -> PreTrainedConfig | None:
    """Return the configuration in a model's folder in a class that takes no second to import; for tokenizers alone.

    Returns None where the class decides what the tokenizer is: where no class of the tokenizer is named.
    """
    try:
        named = json.loads((Path(source) / "tokenizer_config.json").read_text())["tokenizer_class"]
        entries = json.loads((Path(source) / CONFIG).read_text()).items()
        read = {name: value for name, value in entries if name in NAMED}  # more would be validated
        return Settings(read, read) if isinstance(named, str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # transformers will say what is wrong
        return None


def eos_ids(lm: CausalLM, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the ids that end a text: those of the generation config of `lm`, else that of `tokenizer`, else none."""
    config = getattr(lm.weights, "generation_config", None)
    ids: int | list[int] | None = getattr(config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = cast(int | None, tokenizer.eos_token_id)
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def generation_output(ids: Tensor, as_dict: bool) -> Tensor | ModelOutput:
    """Return what transformers' `generate` returns.

    ids: prompts and outputs, int64 [b, t].
    as_dict: whether its output object is returned, with the ids in it; else the ids themselves.
    """
    from transformers.generation.utils import GenerateDecoderOnlyOutput  # takes seconds

    return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids)) if as_dict else ids


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
