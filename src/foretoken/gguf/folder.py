"""Turn a GGUF file into a folder: an ordinary Hugging Face one with weights in bfloat16, or one with packed weights."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from foretoken.core.errors import ForetokenError
from foretoken.core.making import making
from foretoken.gguf.config import gguf_config, gguf_generation_config
from foretoken.gguf.reader import Reader, open_gguf
from foretoken.gguf.stored import Stored, in_bfloat16, write_stored
from foretoken.gguf.tensors import Weight, architecture_of, gguf_weights
from foretoken.gguf.tokenizer import gguf_tokenizer

Progress = Callable[[int, int], None]  # called with the number of weights done so far, and that of all


@dataclass(frozen=True)
class Contents:
    """What a GGUF file holds.

    weights: those of the model with the configuration `config`, in the order of the model's state_dict.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerFast
    weights: list[Weight]


def contents(source: Path, accepted: Callable[[], object] = lambda: None) -> Contents:
    """Return what a GGUF file holds; its weights stay on disk.

    source: the path of the file.
    accepted: called where the file seems to be whole and of a known architecture; to be sure takes seconds more.

    Raises ForetokenError for a file that is not a whole GGUF file of a known architecture.
    """
    reader = open_gguf(source)
    with _naming(source):
        architecture_of(reader)
        whole = _has_all_layers(reader)
    if whole:
        accepted()
    with _naming(source):
        config = gguf_config(reader)
        weights = _checked(gguf_weights(reader), config)
        return Contents(config, gguf_generation_config(reader), gguf_tokenizer(reader), weights)


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """Turn errors in what a file says of itself into a ForetokenError; source: the file."""
    try:
        yield
    except (ForetokenError, OSError, MemoryError, ImportError):
        raise
    except Exception as error:  # of this or that library, for values that make no sense
        why = " ".join(str(error).split())
        raise ForetokenError(
            f"Cannot make a model of the GGUF file {source}: what it says of itself is damaged ({why}). Get it again."
        ) from error


def write_folder(source: Path, folder: Path, progress: Progress = lambda done, total: None) -> None:
    """Write a GGUF file as an ordinary Hugging Face folder.

    Weights are dequantised, rounded to bfloat16 and written a few rows at a time, so that memory stays small.

    source: the path of the file.
    folder: the folder to make, which must not exist.
    progress: called with the number of weights written so far, and that of all.

    Raises ForetokenError for a file that is not a whole GGUF file of a known architecture; OSError where writing fails.
    """
    found = contents(source)
    found.config.dtype = torch.bfloat16
    weights = [in_bfloat16(weight) for weight in found.weights]
    write_contents(found, folder, weights, "model.safetensors", progress)


def write_contents(
    found: Contents, folder: Path, weights: list[Stored], name: str, progress: Progress = lambda done, total: None
) -> None:
    """Write what a GGUF file holds as a folder: configurations, tokenizer and weights.

    found: what the file holds.
    folder, progress: as in `write_folder`.
    weights: the weights in the form in which they are written.
    name: the name of the file for them.

    Raises OSError where writing fails.
    """
    folder.mkdir(parents=True)
    found.config.save_pretrained(folder)
    found.generation_config.save_pretrained(folder)
    try:
        found.tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception where it cannot write
        raise OSError(f"{folder / 'tokenizer.json'}: {error}") from error
    # Where these are not listed, transformers parses the whole vocabulary once more to find them.
    settings = folder / "tokenizer_config.json"
    added = {index: token.__getstate__() for index, token in found.tokenizer.added_tokens_decoder.items()}
    described = json.loads(settings.read_text(encoding="utf-8")) | {"added_tokens_decoder": added}
    settings.write_text(json.dumps(described, indent=2), encoding="utf-8")
    write_stored(weights, folder / name, progress)


def _has_all_layers(reader: Reader) -> bool:
    """Whether the file of `reader` has tensors of each layer of its model and of no other."""
    layers = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    count = reader.of_model("block_count", 0)
    return len(layers) == count and layers == {str(layer) for layer in range(count)}


def _checked(weights: list[Weight], config: PreTrainedConfig) -> list[Weight]:
    """Return the weights in the order of the model's state_dict.

    Raises ForetokenError where they are not exactly those of the model that the file's metadata describe.
    """
    from transformers import AutoModelForCausalLM  # takes seconds

    if config.num_hidden_layers > len(weights):  # to make so many might take all memory
        raise ForetokenError(
            f"The GGUF file has {len(weights)} tensors, and its configuration {config.num_hidden_layers} layers: it is "
            "not whole, get it again."
        )
    with making, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {weight.name: weight for weight in weights}
    shapes = {name: weight.shape for name, weight in found.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise ForetokenError(
            f"{len(wrong)} tensors of the GGUF file are not those of its configuration: {name} has shape "
            f"{shapes.get(name, 'none')} and should have {wanted.get(name, 'none')}."
        )
    return [found[name] for name in wanted]
