"""What models are named by, read without torch, so that the command line tells of a bad name at once."""

import os
import re
from pathlib import Path

from foretoken.catalogue.known import known_model
from foretoken.core.errors import ForetokenError

DTYPES = ("float32", "bfloat16", "float16")
AUTO, ON, OFF = COMPILE = ("auto", "on", "off")
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
    """Refuse what names no kind of device; whether this machine has it is for torch to say."""
    if device is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?", device):
        raise ForetokenError(f"Unknown device {device}: choose cpu, cuda, or cuda:N for one of several.")


def is_folder(source: str) -> bool:
    return os.path.isdir(source)


def located(source: str) -> str:
    """The folder, or hub id, that `source` stands for: itself, or the folder of a fetched model of this short name.

    Raises ForetokenError for what is neither the folder of a model nor, perhaps, a hub id.
    """
    fetched = None if os.path.exists(source) else known_model(source)
    if fetched is not None:
        return str(fetched)
    if os.path.isfile(source):
        raise ForetokenError(f"{source} is a file: give the path of a Hugging Face model folder.")
    # What stands in a folder that is here is no hub id but a typing error: the hub is not asked for it.
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).parent.is_dir()
    if looks_local and not is_folder(source):
        raise ForetokenError(f"Model folder {source} does not exist: give the path of a Hugging Face model folder.")
    if is_folder(source) and not (Path(source) / "config.json").exists():
        raise ForetokenError(f"Folder {source} has no config.json: it is neither a model's nor a trained draft head's.")
    return source


def check_head_folder(folder: str | Path) -> None:
    """Refuse a folder without weights of a draft head."""
    if head_file(folder) is None:
        raise ForetokenError(f"Folder {folder} holds no draft head: it needs one of {', '.join(HEAD_FILES)}.")


def head_file(folder: str | Path) -> Path | None:
    """The weights in a folder, if it holds any that a draft head could be in."""
    return next((Path(folder) / name for name in HEAD_FILES if (Path(folder) / name).exists()), None)
