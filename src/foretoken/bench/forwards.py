"""The ways of running one forward that are compared, and the places at which they are."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from foretoken.bench.methods import THEIRS
from foretoken.core.errors import ForetokenError
from foretoken.models.causal_lm import CausalLM
from foretoken.models.expand import expand
from foretoken.models.load import choose_device, choose_dtype, load_model
from foretoken.models.named import located, size_named
from foretoken.models.panels import PanelLinear, pack
from foretoken.models.rows import Rows

EAGER, COMPILED, TRACED = "eager", "compiled", "torch.compile"
BASE_NODES = (1, 8)  # at which contexts and batches are compared: plain decoding, and a tree


@dataclass(frozen=True)
class Place:
    """`nodes` new tokens in each of `batch` rows after `context` committed ones."""

    nodes: int
    context: int
    batch: int


@dataclass(frozen=True)
class Curves:
    """Over nodes at the first context and batch; over context and over batch at 1 and 8 nodes."""

    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (("nodes", self.nodes), ("context", self.contexts), ("batch", self.batches)):
            if not values or min(values) < 1:
                raise ForetokenError(f"--{name} must be one or more numbers >= 1.")

    @property
    def over_nodes(self) -> list[Place]:
        return [Place(n, self.contexts[0], self.batches[0]) for n in self.nodes]

    @property
    def over_context(self) -> list[Place]:
        return [Place(n, c, self.batches[0]) for n in BASE_NODES for c in sorted(self.contexts)]

    @property
    def over_batch(self) -> list[Place]:
        return [Place(n, self.contexts[0], b) for n in BASE_NODES for b in sorted(self.batches)]

    @property
    def places(self) -> list[Place]:
        """Each once, those of one context and batch side by side."""
        places = dict.fromkeys(self.over_nodes + self.over_context + self.over_batch)
        return sorted(places, key=lambda p: (p.context, p.batch, p.nodes))


@dataclass
class OurPath:
    """`Rows.score` on a binary tree. what: of which kind the path is for this model."""

    name: str
    lm: CausalLM
    rows: Rows = field(init=False)

    @property
    def what(self) -> str:
        return self.lm.execution

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.lm.model)

    def open(self, context: int, batch: int, nodes: int) -> None:
        """Commit `context` tokens to `batch` rows, with room for so many nodes."""
        self.rows = self.lm.open(batch, context + nodes)
        for _ in range(batch):
            self.rows.extend(self.rows.join(), _tokens(self.lm, context))

    def forward(self, nodes: int) -> None:
        batch = len(self.rows)
        self.rows.score([_tokens(self.lm, nodes)] * batch, [[-1, *((i - 1) // 2 for i in range(1, nodes))]] * batch)

    def forget(self) -> None:
        """Drop the nodes of the last forward."""
        self.rows.keep([()] * len(self.rows))


@dataclass
class TheirPath:
    """transformers' forward with its default cache. It knows no trees: the nodes are a chain, which costs the same."""

    model: PreTrainedModel
    lm: CausalLM
    name: str = field(default=THEIRS, init=False)
    what: str = field(default="modules, DynamicCache", init=False)
    nodes: int = field(default=0, init=False)
    batch: int = field(default=0, init=False)
    cache: DynamicCache = field(init=False)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    def open(self, context: int, batch: int, nodes: int) -> None:
        self.cache, self.batch = DynamicCache(), batch
        self.forward(context)

    @torch.inference_mode()
    def forward(self, nodes: int) -> None:
        self.nodes = nodes
        ids = torch.tensor([_tokens(self.lm, nodes)] * self.batch, device=self.model.device)
        self.model(input_ids=ids, past_key_values=self.cache, use_cache=True)

    @torch.inference_mode()
    def forget(self) -> None:
        self.cache.crop(-self.nodes)


Path = OurPath | TheirPath


def _tokens(lm: CausalLM, n: int) -> list[int]:
    return [1 + i * 37 % (lm.vocab_size - 1) for i in range(n)]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a forward reads: all but an embedding table, of which it reads a few rows."""
    total = sum(p.nbytes for p in model.parameters())
    total += sum(m.panels.nbytes for m in model.modules() if isinstance(m, PanelLinear))
    embedding: Any = model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue]
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return total if getattr(head, "weight", None) is embedding else total - embedding.nbytes


@dataclass(frozen=True)
class Forwards:
    """The paths of one model, its baseline first. label: what to call its cost."""

    paths: Sequence[Path]
    lm: CausalLM
    num_params: int
    label: str


def load_forwards(
    target: str, device: str | None, dtype: str | None, expansion: str | None, seed: int, traced: bool = False
) -> Forwards:
    """transformers' model, ours over the same weights, and ours compiled; traced: by torch.compile too."""
    size = None if expansion is None else size_named(expansion)
    chosen = choose_device(device)
    compiled = load_model(target, chosen, choose_dtype(dtype))
    loaded: Any = AutoModelForCausalLM.from_pretrained(located(target), dtype=compiled.dtype)
    theirs: PreTrainedModel = loaded.to(chosen).eval()
    label = "as loaded"
    if size is not None:
        theirs = expand(theirs, size, seed)
        label = f"expanded {expansion}"
        ours = copy.deepcopy(theirs)
        pack(ours)
        compiled = CausalLM(ours, target)
    eager = CausalLM(theirs, target)
    paths: list[Path] = [TheirPath(theirs, eager), OurPath(EAGER, eager)]
    if compiled.execution != eager.execution:
        paths.append(OurPath(COMPILED, compiled))
    if traced:
        forward = CausalLM(compiled.model, target)
        forward.trace()
        paths.append(OurPath(TRACED, forward))
    return Forwards(paths, compiled, sum(p.numel() for p in theirs.parameters()), label)
