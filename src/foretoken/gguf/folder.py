"""A GGUF file -> an ordinary Hugging Face folder: configuration, tokenizer, and weights in bfloat16."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from foretoken.core.errors import ForetokenError
from foretoken.gguf.config import gguf_config, gguf_generation_config
from foretoken.gguf.reader import open_gguf
from foretoken.gguf.tensors import Weight, gguf_weights
from foretoken.gguf.tokenizer import gguf_tokenizer

BYTES = 2  # of a bfloat16


def write_folder(source: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write what is in the GGUF file `source` into `folder`, which is made.

    Weights are dequantised, rounded to bfloat16 and written a few rows at a time, so that memory stays small.
    progress: called with the weights written so far and their number.
    Raises ForetokenError for a file that is not a whole GGUF file of a known architecture; OSError where writing fails.
    """
    reader = open_gguf(source)
    config = gguf_config(reader)
    weights = gguf_weights(reader)
    _check(weights, config)
    tokenizer = gguf_tokenizer(reader)
    config.dtype = torch.bfloat16
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    gguf_generation_config(reader).save_pretrained(folder)
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # what the tokenizers library raises where it cannot write is of no class of its own
        raise OSError(f"{folder / 'tokenizer.json'}: {error}") from error
    _write_weights(weights, folder / "model.safetensors", progress)


def _check(weights: list[Weight], config: PreTrainedConfig) -> None:
    """Refuse a file whose tensors are not exactly those of the model that its metadata describe."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {weight.name: weight.shape for weight in weights}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ForetokenError(
            f"{len(wrong)} tensors of the GGUF file are not those of its configuration: {name} has shape "
            f"{found.get(name, 'none')} and should have {wanted.get(name, 'none')}."
        )


def _write_weights(weights: list[Weight], path: Path, progress: Callable[[int, int], None]) -> None:
    """A safetensors file: the length of a JSON header, the header, then the tensors one after the other.

    The library's own `save_file` needs all tensors in memory at once.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + BYTES * weight.stored.n_elements
        header[weight.name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for weight in weights:
            for values in weight.chunks():
                rounded = torch.from_numpy(np.require(values, requirements="W")).to(torch.bfloat16)
                file.write(rounded.view(torch.int16).numpy().data)
                written += len(values)
                progress(written, end // BYTES)
