"""Check the names of models, dtypes and devices without importing torch, so that a wrong one is reported at once."""

import difflib
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from foretoken.catalogue.known import known_model, known_models
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import shown
from foretoken.gguf.split import named_parts, parts_of
from foretoken.models.folder import check_config, check_no_adapter

DTYPES = ("float32", "bfloat16", "float16")
NO_MODELS = ("self", "mtp", "ngram", "suffix", "auto", "none")  # names of drafters that are not models of their own
AUTO, ON, OFF = COMPILE = ("auto", "on", "off")
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_k", "q4_0")  # what weights can be quantised to
# The kind of blocks of every LM head, whose errors reach the logits undamped. With 4 bits in it as in the layers, 0.85
# of the draft tokens of a quantised copy of the small target were accepted at temperature 0, with 8 bits 0.94:
# docs/LOG.md, 2026-11-25.
HEAD_KIND = "q8_0"
# The kind of blocks of weights that only draft. Of drafter "self" more draft tokens were accepted than with q4_1, which
# takes more bits: docs/LOG.md, 2026-11-26. Drafter models of 16 bits were slower: docs/LOG.md, 2026-11-30.
DRAFTING_KIND = "q4_k"
AS_STORED = "none"  # in the place of a kind of blocks: weights are left as they are
ENDINGS = (".safetensors", ".bin", ".pt", ".pth")  # endings of files with weights in a folder
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # there is one where drivers of GPUs are, also in containers
HUB_S = 10  # seconds within which the hub has to answer
# Files in which a published draft head may be; the first two may also hold a language model.
HEAD_FILES = (
    "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
    "hydra_lm_head.safetensors", "hydra_lm_head.pt",
)  # fmt: skip


def check_device(device: str | None) -> None:
    """Raise ForetokenError where `device` names no kind of device, and for CUDA where torch was built without it.

    None names none and is accepted. Whether this machine has the device is checked later, by `load.choose_device`.
    """
    if device is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?", device):
        raise ForetokenError(f"Unknown device {device}: choose cpu, cuda, or cuda:N for one of several.")
    if device is not None and device.startswith("cuda") and version("torch").endswith("+cpu"):
        raise ForetokenError(f"Device {device} cannot be used: this torch was built for CPUs alone; choose cpu.")


def surely_cpu(device: str | None) -> bool:
    """Whether models run on the CPU, as far as can be known without torch.

    device: as in `check_device`; None stands for a GPU where there is one, see `load.choose_device`.
    """
    return device == "cpu" or (device is None and not any(map(os.path.exists, GPU_FILES)))


@cache
def _check_hub(hub_id: str) -> None:
    """Raise ForetokenError for a model that is neither in this machine's hub cache nor found at the hub.

    The hub's own client would try for a minute before it fails.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            return
        HfApi().model_info(hub_id, timeout=HUB_S)
    except Exception as error:  # of the network, of the hub's answer, of the id's form: the client has no class for all
        why = " ".join(str(error).split()) or type(error).__name__
        raise ForetokenError(f"Model {hub_id} is no folder here, and cannot be had from the hub: {why}") from error


def located(source: str) -> str:
    """Return the folder, GGUF file or hub id that `source` stands for.

    That is `source` itself; the only GGUF file in it, where it is a folder without a config.json or without other
    weights; or the model that was fetched by this short name. A GGUF file in parts is named by its first part.

    Raises ForetokenError for what is neither a model's folder nor its GGUF file, for a missing part, and for a hub id
    that is not found.
    """
    fetched = None if os.path.exists(source) else known_model(source)
    if fetched is not None:
        return str(fetched)
    if os.path.isfile(source):
        parts = parts_of(Path(source))
        for part in parts:
            _check_gguf(part)
        return str(parts[0])
    # A/B where there is a folder A is taken for a mistyped path, not for a hub id.
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).parent.is_dir()
    if not os.path.isdir(source):
        if looks_local:
            raise _unknown(source)
        _check_hub(source)
        return source
    described = (Path(source) / "config.json").exists()
    files = sorted(Path(source).glob("*.gguf"))
    if files and not (described and any(path.suffix in ENDINGS for path in Path(source).iterdir())):
        models = {named_parts(path)[0]: str(path) for path in reversed(files)}
        if len(models) > 1:
            choices = ", ".join(sorted(models.values()))
            raise ForetokenError(f"Folder {source} has {len(files)} GGUF files: name one of {choices}.")
        return located(str(files[0]))
    if not described:
        check_no_adapter(source)
        raise ForetokenError(f"Folder {source} has no config.json: it is neither a model's nor a trained draft head's.")
    check_config(source)
    return source


def _unknown(source: str) -> ForetokenError:
    """Return the error that there is no model of this name, and which ones there are."""
    known = list(known_models())
    is_path = "/" in source or source.endswith(".gguf")
    begun = [name for name in known if source and name.startswith(source)]
    close = [] if is_path else begun or difflib.get_close_matches(source, [*known, *NO_MODELS], 1)
    meant = f"did you mean {'drafter ' if close[0] in NO_MODELS else ''}{close[0]}? Else " if close else ""
    if source in NO_MODELS:
        meant = "that is the name of a drafter; "
    elif is_path:
        meant = "no file or folder has this name; "
    return ForetokenError(
        f"There is no model {shown(source)} here: {meant}give the path of a Hugging Face model folder or GGUF file, a "
        f"hub id (OWNER/NAME), or a name that `foretoken fetch` lists: {', '.join(known)}."
        + ("" if is_path else f" A drafter can also be one of {', '.join(NO_MODELS)}.")
    )


def is_gguf(source: str) -> bool:
    """Whether `source`, from `located`, is a GGUF file."""
    return os.path.isfile(source)


def _check_gguf(path: Path) -> None:
    """Raise ForetokenError for a file that does not begin as a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
    if magic != b"GGUF":
        raise ForetokenError(f"{path} is no GGUF file: give one, or the path of a Hugging Face model folder.")


def check_head_folder(folder: str | Path) -> Path:
    """Return what `head_file` finds in a `folder`. Raises ForetokenError where that is none."""
    found = head_file(folder)
    if found is None:
        raise ForetokenError(f"Folder {folder} holds no draft head: it needs one of {', '.join(HEAD_FILES)}.")
    return found


def head_file(folder: str | Path) -> Path | None:
    """Return the path of the first of HEAD_FILES that `folder` has, None if it has none."""
    return next((Path(folder) / name for name in HEAD_FILES if (Path(folder) / name).exists()), None)
