"""What models are named by, read without torch, so that the command line tells of a bad name at once."""

import difflib
import os
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from foretoken.catalogue.known import known_model, known_models
from foretoken.core.errors import ForetokenError
from foretoken.models.folder import check_config

DTYPES = ("float32", "bfloat16", "float16")
NO_MODELS = ("self", "mtp", "ngram", "suffix", "auto", "none")  # drafters that stand in a model's place
AUTO, ON, OFF = COMPILE = ("auto", "on", "off")
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_k", "q4_0")  # what weights can be quantised to
HUB_S = 10  # seconds that the hub has for its answer
# Files that a published draft head may be in; the first two may also be a language model's.
HEAD_FILES = (
    "model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt",
    "hydra_lm_head.safetensors", "hydra_lm_head.pt",
)  # fmt: skip


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ForetokenError(f"Unknown dtype {dtype}: choose one of {', '.join(DTYPES)}.")


def check_compile(compile: str) -> None:
    if compile not in COMPILE:
        raise ForetokenError(f"Unknown compile {compile}: choose one of {', '.join(COMPILE)}.")


def check_device(device: str | None) -> None:
    """Refuse what names no kind of device, and CUDA where torch was built without it; plugins may bring other kinds.
    Whether this machine has the device is else for torch to say."""
    if device is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?", device):
        raise ForetokenError(f"Unknown device {device}: choose cpu, cuda, or cuda:N for one of several.")
    if device is not None and device.startswith("cuda") and version("torch").endswith("+cpu"):
        raise ForetokenError(f"Device {device} cannot be used: this torch was built for CPUs alone; choose cpu.")


def check_quantise(kind: str | None, option: str = "quantise") -> None:
    """Refuse a kind of blocks that weights cannot be quantised to. option: what asks for it."""
    if kind is not None and kind not in QUANTISED:
        raise ForetokenError(f"Unknown {option} {kind}: choose one of {', '.join(QUANTISED)}.")


@cache
def _check_hub(hub_id: str) -> None:
    """Refuse a model that is not in the hub's cache here, where the hub does not know it or cannot be asked: its own
    client would ask for a minute.

    Raises ForetokenError.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        return
    try:
        HfApi().model_info(hub_id, timeout=HUB_S)
    except Exception as error:  # of the network, of the hub's answer, of the id's form: the client has no class for all
        why = " ".join(str(error).split()) or type(error).__name__
        raise ForetokenError(f"Model {hub_id} is no folder here, and cannot be had from the hub: {why}") from error


def located(source: str) -> str:
    """The folder, GGUF file or hub id that `source` stands for: itself, the only GGUF file in it, or what was fetched
    by this short name.

    Raises ForetokenError for what is neither the folder nor the GGUF file of a model nor, perhaps, a hub id.
    """
    fetched = None if os.path.exists(source) else known_model(source)
    if fetched is not None:
        return str(fetched)
    if os.path.isfile(source):
        _check_gguf(source)
        return source
    # What stands in a folder that is here is no hub id but a typing error: the hub is not asked for it.
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).parent.is_dir()
    if not os.path.isdir(source):
        if looks_local:
            raise _unknown(source)
        _check_hub(source)
    elif not (Path(source) / "config.json").exists():
        files = sorted(str(path) for path in Path(source).glob("*.gguf"))
        if len(files) > 1:
            raise ForetokenError(f"Folder {source} has {len(files)} GGUF files: name one of {', '.join(files)}.")
        if files:
            return located(files[0])
        raise ForetokenError(f"Folder {source} has no config.json: it is neither a model's nor a trained draft head's.")
    else:
        check_config(source)
    return source


def _unknown(source: str) -> ForetokenError:
    """That there is no model of this name, and which ones there are."""
    known = list(known_models())
    close = [] if "/" in source else difflib.get_close_matches(source, [*known, *NO_MODELS], 1)
    return ForetokenError(
        f"There is no model {source} here: "
        + (f"did you mean {close[0]}? Else " if close else "")
        + "give the path of a Hugging Face model folder or GGUF file, a hub id (OWNER/NAME), or a name that "
        f"`foretoken fetch` lists: {', '.join(known)}. A drafter can also be one of {', '.join(NO_MODELS)}."
    )


def is_gguf(source: str) -> bool:
    """Whether what `located` gave is a GGUF file."""
    return os.path.isfile(source)


def _check_gguf(path: str) -> None:
    """Refuse a file that is no GGUF file, or a part of one."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
    if magic != b"GGUF":
        raise ForetokenError(f"{path} is no GGUF file: give one, or the path of a Hugging Face model folder.")


def check_head_folder(folder: str | Path) -> None:
    """Refuse a folder without weights of a draft head."""
    if head_file(folder) is None:
        raise ForetokenError(f"Folder {folder} holds no draft head: it needs one of {', '.join(HEAD_FILES)}.")


def head_file(folder: str | Path) -> Path | None:
    """The weights in a folder, if it holds any that a draft head could be in."""
    return next((Path(folder) / name for name in HEAD_FILES if (Path(folder) / name).exists()), None)
