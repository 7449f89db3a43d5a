"""The modules of a transformers model with their numbers and weights, and without the code that runs them.

Our kernel runs a whole model by itself, and only reads weights and numbers from transformers' modules. Importing their
code takes seconds and a hundred MiB. So what a packed model consists of is written down when transformers has made it
for the first time, and later starts read that.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from foretoken.core.making import making
from foretoken.models.cache import Plane
from foretoken.models.experts import PanelMixture
from foretoken.models.hf_model import HFModel
from foretoken.models.layout import Layout
from foretoken.models.panels import PackedEmbedding, PanelLinear

MODULES, TENSORS = "modules.json", "modules.safetensors"  # the files in which a skeleton is kept
PROBE = "probe"  # the name of `Layout.probe` in TENSORS


class Settings(PreTrainedConfig):
    """The configuration of a skeleton: all entries of the original, whose class takes seconds to import."""

    def __init__(self, entries: dict[str, Any], own: dict[str, Any]) -> None:
        """Take all `entries`; own: those that differ from the defaults of the original's class."""
        super().__init__(**entries)
        self._own = own

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the entries that differ from the defaults of the original's class."""
        return dict(self._own)

    def original(self) -> PreTrainedConfig:
        """Return the configuration in the original's class."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes a second

        config = CONFIG_MAPPING[self._own["model_type"]].from_dict(self.to_diff_dict())
        config.name_or_path = self.name_or_path
        return config


class Part(nn.Module):
    """A module of a skeleton. Its class, made for it, has the name of the original's class."""


P = TypeVar("P", bound=Part)


class Skeleton(Part):
    """The modules of a model that our kernel runs, under transformers' names; they have no forward.

    config, generation_config: the configurations.
    dtype, device: what the model computes in, and where.
    layout: the layout of the original.
    probed: whether it has passed the probe (probe.py), with the same weights, code and processor.
    without_weights: returns it once more, without weights.
    """

    config: Settings
    generation_config: GenerationConfig
    dtype: torch.dtype
    layout: Layout
    probed = False
    without_weights: Callable[[], "Skeleton"]
    device = torch.device("cpu")

    @property
    def base_model(self) -> Any:
        """The modules before the LM head."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """Return the module that embeds tokens."""
        return self.base_model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Return the LM head."""
        return self.lm_head

    @cached_property
    def whole(self) -> HFModel:
        """The transformers model over the same weights, which is made when it is first asked for."""
        model = without_weights(self.config.original(), self.generation_config, self.dtype)
        for name, module in self.named_modules():
            if isinstance(module, PanelMixture):
                block = model.get_submodule(name)
                model.set_submodule(name, PanelMixture(block, module.router, module.gate_up_proj, module.down_proj))
            elif isinstance(module, PanelLinear | PackedEmbedding):
                model.set_submodule(name, module)
        for name, weight in self.named_parameters(remove_duplicate=False):
            path, _, part = name.rpartition(".")
            setattr(model.get_submodule(path), part, weight)
        return model.eval()


class Module(NamedTuple):
    """A module of a model. name: its place, such as model.layers.0. kind: its class's name. numbers: its settings."""

    name: str
    kind: str
    numbers: dict[str, Any]


def modules_of(model: HFModel) -> list[Module]:
    """Return the modules of a transformers `model`, whose linear layers are not packed yet."""

    def numbers(module: nn.Module) -> dict[str, Any]:
        return {key: x for key, x in vars(module).items() if type(x) in (bool, int, float, str) and key[0] != "_"}

    return [Module(name, type(module).__name__, numbers(module)) for name, module in model.named_modules()]


def write_skeleton(folder: Path, modules: list[Module], model: HFModel, layout: Layout) -> None:
    """Write what a skeleton consists of, apart from weights, into a `folder`.

    modules: from `modules_of`.
    model: the same model, packed.
    layout: its layout.
    """
    planes = [pair and [[plane.heads, plane.dim] for plane in pair] for pair in layout.planes]
    config = model.config
    about = {
        "entries": json.loads(config.to_json_string(use_diff=False)),
        "own": json.loads(config.to_json_string()),
        "modules": modules,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layout": [planes, dict(layout.windows), layout.context, layout.hard],
    }
    (folder / MODULES).write_text(json.dumps(about))
    assert model.generation_config is not None
    # Not by `save_pretrained`, which refuses what some checkpoints have.
    model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    tensors = {name: buffer.contiguous() for name, buffer in model.named_buffers()}
    # `save_file` would raise an error of its own on a full disk.
    (folder / TENSORS).write_bytes(save({**tensors, PROBE: layout.probe.contiguous()}))


def read_skeleton(folder: Path) -> Skeleton | None:
    """Return the skeleton that `write_skeleton` wrote into a `folder`, without weights; None where it wrote none."""
    if not (folder / MODULES).exists():
        return None
    about, tensors = json.loads((folder / MODULES).read_text()), load_file(folder / TENSORS)
    return _assembled(about, tensors, GenerationConfig.from_pretrained(folder))


def _assembled(about: dict[str, Any], tensors: dict[str, Tensor], generation: GenerationConfig) -> Skeleton:
    """Return a skeleton without weights; about, tensors: what is in MODULES and TENSORS."""
    dtype: torch.dtype = getattr(torch, about["dtype"])
    modules = [Module(*each) for each in about["modules"]]
    model = _made(modules[0], Skeleton)
    for module in modules[1:]:
        path, _, own = module.name.rpartition(".")
        model.get_submodule(path).register_module(own, _part(module, dtype))
    for name, buffer in tensors.items():
        path, _, own = name.rpartition(".")
        if name != PROBE:
            model.get_submodule(path).register_buffer(own, buffer)
    planes, windows, context, hard = about["layout"]

    def plane(sizes: list[int]) -> Plane:
        return Plane(sizes[0], sizes[1], dtype, model.device)

    pairs = tuple(pair and (plane(pair[0]), plane(pair[1])) for pair in planes)
    model.layout = Layout(pairs, windows, context, hard, tensors[PROBE])
    model.config = Settings(about["entries"], about["own"])
    model.generation_config, model.dtype = generation, dtype
    model.without_weights = partial(_assembled, about, tensors, generation)
    return model


def _part(module: Module, dtype: torch.dtype) -> nn.Module:
    """Return a module without weights."""
    numbers = module.numbers
    empty: dict[str, Any] = {"device": "meta", "dtype": dtype}
    match module.kind:
        case "ModuleList":
            return nn.ModuleList()
        case "Linear":
            return nn.Linear(numbers["in_features"], numbers["out_features"], bias=False, **empty)
        case "Embedding":
            rows = torch.empty(numbers["num_embeddings"], numbers["embedding_dim"], **empty)
            return nn.Embedding.from_pretrained(rows)  # its own constructor draws values, for which torch imports a lot
        case _:
            return _made(module, Part)


def _made(module: Module, base: type[P]) -> P:
    """Return a module with the name of a class and the numbers of another one; base: what its class derives from."""
    made: Any = type(module.kind, (base,), {})()
    vars(made).update(module.numbers)
    return made


def without_weights(config: PreTrainedConfig, generation: GenerationConfig, dtype: torch.dtype) -> HFModel:
    """Return a model whose parameters have no values and take no memory; its buffers are computed as usual.

    config: its configuration, which names its class.
    generation: the configuration of its generation.
    dtype: its dtype.
    """
    with making, _no_parameters():
        model = auto_class(config).from_config(config, dtype=dtype)
    model.generation_config = generation
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that makes the model with a `config`: that of models of text, where one has it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # takes seconds
    from transformers.models.auto import modeling_auto as known

    with_images = config.model_type in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for_text = config.model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if with_images and not for_text else AutoModelForCausalLM


@contextmanager
def _no_parameters() -> Iterator[None]:
    """Let parameters that this thread makes inside the block take no memory; buffers are made as usual."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
