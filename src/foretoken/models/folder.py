"""A model's folder, looked at without torch: what is broken in it is said at once, before anything is imported."""

import json
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text

CONFIG, WEIGHTS = "config.json", "model*.safetensors"  # other names are not read
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")  # files beside the tokenizer's
AGAIN = "get the file again"


def check_config(folder: str | Path) -> None:
    """Refuse a folder whose config.json is not one. Raises ForetokenError."""
    _read_object(Path(folder) / CONFIG)


def check_weights(folder: str | Path) -> None:
    """Refuse a folder with weights that are not whole. Raises ForetokenError, which names the file."""
    for path in sorted(Path(folder).glob(WEIGHTS)):
        _check_whole(path)


def no_template(which: str, model: str) -> ForetokenError:
    """That a conversation needs what a model does not have. which: names the conversation. model: its name."""
    return ForetokenError(
        f"{which} needs a chat template, and the tokenizer of {model} has none: take an instruction-tuned model, or "
        "give the text itself as a prompt."
    )


def check_template(folder: str | Path, which: str) -> None:
    """Refuse a conversation where the tokenizer in a model's folder has no chat template; elsewhere do nothing.

    which: names the conversation in the message.
    """
    settings = Path(folder) / "tokenizer_config.json"
    if not settings.exists() or any((Path(folder) / name).exists() for name in TEMPLATES):
        return
    if not _read_object(settings).get("chat_template"):
        raise no_template(which, str(folder))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ForetokenError."""
    try:
        found = json.loads(read_text(str(path), "file"))
    except ValueError as error:
        raise ForetokenError(f"{path} is not JSON ({error}): mend it, or {AGAIN}.") from error
    if not isinstance(found, dict):
        raise ForetokenError(f"{path} is not a JSON object: mend it, or {AGAIN}.")
    return found


def _check_whole(path: Path) -> None:
    """Refuse a safetensors file that is not as long as its header says. Raises ForetokenError."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb"), safe_open(path, framework="numpy"):
            pass
    except OSError as error:
        raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
    except SafetensorError as error:
        raise ForetokenError(f"{path} is not a whole safetensors file ({error}): {AGAIN}.") from error
