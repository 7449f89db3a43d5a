"""`python -m benchmarks execution`: milliseconds of one forward over nodes, context and batch.

Transformers' forward, ours without compiled code, and our compiled one take turns at every place.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path as File
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from benchmarks.expand import SIZES, Expand, expand
from benchmarks.forwards import OurPath, Path, Place, Round, measure, tokens
from foretoken.cli import options
from foretoken.cli.measuring import show
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file
from foretoken.core.limits import check_counts
from foretoken.measure.clocks import clock_named, seconds
from foretoken.measure.harness import Turn, until_interrupted
from foretoken.measure.machine import machine
from foretoken.measure.methods import THEIRS
from foretoken.measure.pair import as_loaded
from foretoken.measure.plot import OUR_COLOR, THEIR_COLOR, Line, Panel, check_plot
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Cell, Report, Spread
from foretoken.measure.results import write_lines
from foretoken.models.causal_lm import CausalLM
from foretoken.models.hf_model import cache_name
from foretoken.models.layout import layout
from foretoken.models.load import choose_device, choose_dtype, load_model
from foretoken.models.named import is_gguf, located
from foretoken.models.panels import PanelLinear, pack
from foretoken.models.static import StaticForward

EAGER, COMPILED, TRACED = "eager", "compiled", "torch.compile"
BASE_NODES = (1, 8)  # at which contexts and batches are compared: plain decoding, and a tree
READ = 1 << 28  # bytes; far more than caches hold
COLORS = {THEIRS: THEIR_COLOR, EAGER: "#e9a23b", TRACED: "#7a4fa3"}
NOTES = [
    "ms: of one forward, median (lowest to highest) of the rounds. x: times as fast as transformers, and as our eager "
    "path; medians of ratios taken inside a round.",
    "GB/s: weights read per second; weights that fit the processor's caches can pass the memory's bandwidth.",
]
DEFAULT_OUT = "foretoken-execution.jsonl"


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
    def panels(self) -> dict[str, list[Place]]:
        """The three by what they are over."""
        context, batch = self.contexts[0], self.batches[0]
        return {
            "nodes": [Place(n, context, batch) for n in self.nodes],
            "context": [Place(n, c, batch) for n in BASE_NODES for c in sorted(self.contexts)],
            "batch": [Place(n, context, b) for n in BASE_NODES for b in sorted(self.batches)],
        }

    @property
    def places(self) -> list[Place]:
        """Each once, those of one context and batch side by side."""
        return sorted(set(chain(*self.panels.values())), key=lambda p: (p.context, p.batch, p.nodes))


@dataclass
class TheirPath:
    """transformers' forward with its default cache. It knows no trees: the nodes are a chain, which costs the same."""

    model: PreTrainedModel
    lm: CausalLM
    nodes: int = field(default=0, init=False)
    batch: int = field(default=0, init=False)
    cache: DynamicCache = field(init=False)

    def open(self, context: int, batch: int, nodes: int) -> None:
        self.cache, self.batch = DynamicCache(), batch
        self.forward(context)

    @torch.inference_mode()
    def forward(self, nodes: int) -> None:
        self.nodes = nodes
        ids = torch.tensor([tokens(self.lm, nodes)] * self.batch, device=self.model.device)
        self.model(input_ids=ids, use_cache=True, **{cache_name(type(self.model)): self.cache})

    @torch.inference_mode()
    def forget(self) -> None:
        self.cache.crop(-self.nodes)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a forward reads: all but an embedding table, of which it reads a few rows."""
    total = sum(p.nbytes for p in model.parameters())
    total += sum(m.panels.nbytes for m in model.modules() if isinstance(m, PanelLinear))
    embedding: Any = getattr(model.get_input_embeddings(), "weight", None)  # pyright: ignore[reportCallIssue]
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return total if getattr(head, "weight", None) is embedding else total - embedding.nbytes


@dataclass(frozen=True)
class Forwards:
    """The paths of one model by name, its baseline first. label: what to call its cost."""

    paths: Mapping[str, Path]
    lm: CausalLM
    num_params: int
    label: str

    @property
    def kinds(self) -> dict[str, str]:
        """How each path runs a forward, by its name."""
        return {
            name: path.lm.execution if isinstance(path, OurPath) else "modules, DynamicCache"
            for name, path in self.paths.items()
        }

    def timing(self, turn: Turn[Round, float]) -> "Timing":
        path, place = self.paths[turn.name], turn.block.place
        assert isinstance(path, OurPath | TheirPath)
        read = weight_bytes(path.model if isinstance(path, TheirPath) else path.lm.model)
        where = (place.nodes, place.context, place.batch, turn.block.number, turn.order)
        return Timing(turn.name, self.kinds[turn.name], *where, turn.result * 1e3, read / turn.result / 1e9)


@dataclass(frozen=True)
class Timing:
    """One turn of one path. ms: of one forward, the mean of the turn's. gb_s: gigabytes of weights read per second."""

    path: str
    what: str
    nodes: int
    context: int
    batch: int
    round: int
    order: int
    ms: float
    gb_s: float

    @property
    def place(self) -> Place:
        return Place(self.nodes, self.context, self.batch)


def load_forwards(
    target: str, device: str | None, dtype: str | None, expansion: str | None, seed: int, traced: bool = False
) -> Forwards:
    """transformers' model, ours over the same weights, and ours compiled; traced: by torch.compile too."""
    size = None if expansion is None else SIZES[expansion]
    chosen = choose_device(device)
    compiled = load_model(target, chosen, choose_dtype(dtype))
    theirs = as_loaded(target, compiled)
    label = "as loaded"
    if size is not None:
        theirs = expand(theirs, size, seed)
        label = f"expanded {expansion}"
        ours = copy.deepcopy(theirs)
        pack(ours)
        compiled = CausalLM(ours, target)
    eager = CausalLM(theirs, target)
    paths: dict[str, Path] = {THEIRS: TheirPath(theirs, eager), EAGER: OurPath(eager)}
    if compiled.execution != eager.execution:
        paths[COMPILED] = OurPath(compiled)
    if traced:
        forward, found = CausalLM(compiled.model, target), layout(compiled.model)
        forward.backend = compiler = StaticForward(compiled.model, target, found.planes)
        compiler.compiling = True
        paths[TRACED] = OurPath(forward)
    return Forwards(paths, compiled, sum(p.numel() for p in theirs.parameters()), label)


@dataclass(frozen=True)
class Row:
    """One path at one place. Times and GB/s over the rounds; ratios of speeds, each taken inside a round: how many
    times faster than transformers, and than our eager path."""

    path: str
    nodes: int
    context: int
    batch: int
    num_runs: int
    ms: Spread
    gb_s: float
    vs_transformers: Spread
    vs_eager: Spread

    @property
    def place(self) -> Place:
        return Place(self.nodes, self.context, self.batch)


def summarise(timings: Sequence[Timing]) -> list[Row]:
    """One row a (place, path), in the order in which they came. Rounds that lack a path are left out."""
    times: dict[tuple[Place, int], dict[str, Timing]] = {}
    for t in timings:
        times.setdefault((t.place, t.round), {})[t.path] = t
    paths = list(dict.fromkeys(t.path for t in timings))
    rows = []
    for place in dict.fromkeys(t.place for t in timings):
        rounds = [of for (where, _), of in times.items() if where == place and len(of) == len(paths)]
        for path in paths if rounds else ():
            rows.append(
                Row(
                    path,
                    place.nodes,
                    place.context,
                    place.batch,
                    len(rounds),
                    Spread.of([of[path].ms for of in rounds]),
                    median(of[path].gb_s for of in rounds),
                    Spread.of([of[THEIRS].ms / of[path].ms for of in rounds]),
                    Spread.of([of[EAGER].ms / of[path].ms for of in rounds]),
                )
            )
    return rows


def memory_bandwidth(device: torch.device, now: Callable[[], float]) -> float:
    """GB/s at which this process, with its threads, reads memory: the best of five sums over 256 MiB."""
    data = torch.ones(READ // 4, device=device)
    best = float("inf")
    for _ in range(5):
        begin = now()
        data.sum()
        best = min(best, now() - begin)
    return READ / best / 1e9


def report(header: dict[str, Any], curves: Curves, rows: Sequence[Row], interrupted: bool) -> Report:
    """Tables over nodes, context and batch. header: machine, model and settings, as plain values; header["paths"]:
    {name: what it is}."""
    found = Report("benchmarks execution", header, [], interrupted, {"rows": [asdict(row) for row in rows]})
    for title, places in curves.panels.items():
        if title == "nodes" or len(places) > 2:
            _fill(found, f"over {title}", places, rows)
    found.tables[-1].notes = NOTES
    return found


def _fill(found: Report, title: str, places: Sequence[Place], rows: Sequence[Row]) -> None:
    names = list(found.header["paths"])
    columns = ["nodes", "context", "batch"]
    for name in names:
        columns += [f"{name} ms", *([] if name == THEIRS else [f"{name} x"]), f"{name} GB/s"]
    table = found.table(title, columns)
    known = {(row.place, row.path): row for row in rows}
    for place in places:
        if (place, names[0]) not in known:
            continue
        cells: list[Cell] = [place.nodes, place.context, place.batch]
        for name in names:
            row = known[place, name]
            cells.append(row.ms.show(2))
            if name != THEIRS:
                of_eager = "" if name == EAGER else f", {row.vs_eager.median:.2f}"
                cells.append(f"{row.vs_transformers.median:.2f}{of_eager}")
            cells.append(f"{row.gb_s:.1f}")
        table.add(*cells)


def panels(names: Sequence[str], curves: Curves, rows: Sequence[Row]) -> list[Panel]:
    """A panel per curve of more than one point, if there is one: medians of ms of a forward; dashed at 1 node where
    there are two numbers of nodes."""
    found = {(row.place, row.path): row.ms.median for row in rows}
    drawn = []
    long = {axis: places for axis, places in curves.panels.items() if len({getattr(p, axis) for p in places}) > 1}
    for axis, places in (long or curves.panels).items():
        lines = []
        for name in names:
            for nodes in [None] if axis == "nodes" else sorted({p.nodes for p in places}):
                shown = [p for p in places if nodes in (None, p.nodes) and (p, name) in found]
                label = name if nodes is None else f"{name}, {nodes} nodes"
                x, y = [getattr(p, axis) for p in shown], [found[p, name] for p in shown]
                lines.append(Line(label, x, y, style="--" if nodes == 1 else "-", color=COLORS.get(name, OUR_COLOR)))
        drawn.append(Panel("", axis, "ms", lines, "x" if axis == "nodes" else "xy"))
    return drawn


def command(
    *,
    target: str | None = None,
    nodes: str = "1,2,4,8,16,24,32,48,64",
    context: str = "256,128,512,1024,2048",
    batch: str = "1,4,8",
    rounds: int = 9,
    expand: Expand = None,
    torch_compile: bool = False,
    seed: int = 0,
    out: str = DEFAULT_OUT,
    plot: str | None = None,
    markdown: bool = False,
    json_: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Milliseconds of one forward over nodes, context and batch: transformers, our eager path, our compiled one.

    Nodes are compared at the first context and batch named, contexts and batches at 1 and 8 nodes. Interleaved in one
    process; the table goes to stdout. For a model that runs in one thread on a CPU the clock is the thread's own.

    nodes: Tree nodes of a forward, with commas.
    context: Committed tokens before them, with commas.
    batch: Rows side by side, with commas.
    rounds: Turns of every path at every place, three forwards each.
    torch_compile: Also torch.compile, which takes up to minutes for every shape.
    seed: Seed of the weights of an expanded target.
    out: File for the single turns, JSONL; replaced if it exists.
    plot: Draw the curves to this file (needs matplotlib).
    """
    shape = [numbers(nodes, "nodes"), numbers(context, "context"), numbers(batch, "batch")]
    check_counts(rounds=rounds)
    check_file(File(out))
    check_plot(plot)
    options.check_models(target, None, dtype=dtype)

    options.quiet()
    curves = Curves(*shape)
    target, _ = options.resolve_models(target, None)
    if is_gguf(located(target)):
        raise ForetokenError(
            f"{target} is a GGUF file, whose packed weights transformers does not run: time it beside llama.cpp by "
            "python -m benchmarks quantised."
        )
    forwards = load_forwards(target, device, dtype, expand, seed, torch_compile)
    options.spare_threads(forwards.num_params)
    of_device = forwards.lm.device
    clock = clock_named(of_device)
    now = seconds(clock, of_device)
    header: dict[str, Any] = {
        **machine(of_device),
        "dtype": str(forwards.lm.dtype).removeprefix("torch."),
        "label": forwards.label,
        "num_params": forwards.num_params,
        "target": target,
        "clock": clock,
        "memory_gb_s": memory_bandwidth(of_device, now),
    }
    done: list[Timing] = []
    paths = forwards.kinds
    turns = measure(forwards.paths, curves.places, rounds, now, options.progress)
    interrupted = until_interrupted(map(forwards.timing, turns), done)
    write_lines(out, map(asdict, done), header)
    options.progress("")
    print(f"{len(done)} turns written to {out}", file=sys.stderr)
    rows = summarise(done)
    if plot is not None:
        draw(panels(list(paths), curves, rows), f"{target}, {forwards.label}: one forward", plot)
    show(report(header | {"paths": paths, "rounds": rounds}, curves, rows, interrupted), json_, markdown)


def numbers(text: str, name: str, kind: type[int] | type[float] = int) -> tuple[Any, ...]:
    """The different ones of an option. kind: int, or float where they need not be whole."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ForetokenError(f"--{name} is {text!r}: give {what} with commas between them.") from None
