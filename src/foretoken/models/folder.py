"""Check a model's folder without importing torch, so that what is broken in it is reported at once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.catalogue.kept import READ
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.core.messages import Message, as_templates_read

CONFIG, WEIGHT_FILES = "config.json", "model*.safetensors"  # other names are not read
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")  # where templates may stand
ADAPTER = "adapter_config.json"
AGAIN = "get the file again"


def on_disk(source: str) -> Path | None:
    """Return the file or folder of a model; of a hub id the folder in which the hub's client has cached it.

    source: the path or the id. Returns None for an id that was not cached.
    """
    from huggingface_hub import try_to_load_from_cache

    if Path(source).exists():
        return Path(source)
    config = try_to_load_from_cache(source, CONFIG)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and any(path.suffix in READ[1:] for path in folder.iterdir()) else None


def classes_named(source: str) -> frozenset[str]:
    """Return the classes that a model's config.json names; none for a file, or an id that was not cached.

    source: the path or the id.

    Raises ForetokenError for a folder whose config.json cannot be read.
    """
    folder = on_disk(source)
    if folder is None or not folder.is_dir():
        return frozenset()
    named = _read_object(folder / CONFIG).get("architectures")
    return frozenset(map(str, named)) if isinstance(named, list) else frozenset()


def check_config(folder: str | Path) -> None:
    """Raise ForetokenError for a `folder` whose config.json cannot be read or holds no JSON object."""
    _read_object(Path(folder) / CONFIG)


def check_no_adapter(folder: str | Path) -> None:
    """Raise ForetokenError for a `folder` with an adapter: transformers applies it only where peft is installed."""
    if (Path(folder) / ADAPTER).exists():
        raise ForetokenError(
            f"Folder {folder} has an adapter ({ADAPTER}): merge it with peft's merge_and_unload(), and save the result "
            "in another folder; or load the adapted model by transformers, and give it as an object."
        )


def check_weights(folder: str | Path) -> None:
    """Raise ForetokenError for a `folder` with a safetensors file that is not as long as its header says.

    The error names the file. A folder with an adapter is refused too.
    """
    from safetensors import SafetensorError, safe_open

    check_no_adapter(folder)
    for path in sorted(Path(folder).glob(WEIGHT_FILES)):
        try:
            with path.open("rb"), safe_open(path, framework="numpy"):
                pass
        except OSError as error:
            raise ForetokenError(f"Cannot read {path}: {error.strerror}.") from error
        except SafetensorError as error:
            raise ForetokenError(f"{path} is not a whole safetensors file ({error}): {AGAIN}.") from error


def no_template(which: str, model: str) -> ForetokenError:
    """Return the error that a conversation needs a chat template, which a model does not have.

    which: names the conversation, such as "The conversation".
    model: names the model.
    """
    return ForetokenError(
        f"{which} needs a chat template, and the tokenizer of {model} has none: take an instruction-tuned model, "
        "such as `foretoken fetch` lists, or give the text itself as a prompt."
    )


def refused_by_template(which: str, error: Exception) -> ForetokenError:
    """Return the error that a chat template does not take a conversation.

    which: names the conversation.
    error: what the template raised.
    """
    why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".!")
    return ForetokenError(f"{which} is refused by the model's chat template: {why}.")


def check_template(folder: str | Path, conversations: Mapping[str, Sequence[Message]]) -> None:
    """Raise ForetokenError for conversations that a model's chat template refuses, or where it has no template.

    A template that fails in another way is let pass, since it may lack what only the tokenizer gives it.

    folder: the model's; nothing is refused where it has no tokenizer_config.json, for example beside a GGUF file.
    conversations: the messages of each, by what it is called in the error, such as "The conversation".
    """
    settings, template = Path(folder) / "tokenizer_config.json", Path(folder) / TEMPLATES[0]
    if not settings.exists():
        return
    configured = _read_object(settings)
    text = read_text(str(template), "file") if template.exists() else configured.get("chat_template")
    if not text and not any((Path(folder) / name).exists() for name in TEMPLATES):
        raise no_template(next(iter(conversations)), str(folder))
    if not isinstance(text, str):  # several templates with names, or in a file of an older form
        return
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second; imports no torch

    named = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in configured.items()
        if name.endswith("_token")
    }
    for which, messages in conversations.items():
        read = [as_templates_read(message, text) for message in messages]
        try:
            render_jinja_template([read], chat_template=text, add_generation_prompt=True, **named)
        except Exception as error:
            if type(error) is TemplateError:  # from its own `raise_exception`; subclasses are errors in the template
                raise refused_by_template(which, error) from error


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ForetokenError where it cannot be read or holds none."""
    try:
        found = json.loads(read_text(str(path), "file"))
    except (ValueError, RecursionError) as error:
        raise ForetokenError(f"{path} is not JSON ({error}): mend it, or {AGAIN}.") from error
    if not isinstance(found, dict):
        raise ForetokenError(f"{path} is not a JSON object: mend it, or {AGAIN}.")
    return found
