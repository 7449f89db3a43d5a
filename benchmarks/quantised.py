"""`python -m benchmarks quantised`: a GGUF file in our kernel beside llama.cpp, and what rounding rows to 8 bits costs.

llama.cpp is used through llama-cpp-python where that can be imported: it is no dependency of ours. Build it for the
machine at hand (`pip install --no-binary :all: llama-cpp-python`), else it lacks the processor's instructions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path as File
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.execution import memory_bandwidth, numbers
from benchmarks.forwards import OurPath, Path, Place, Round, measure
from foretoken.cli import options
from foretoken.cli.measuring import show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.measure.clocks import WALL, seconds
from foretoken.measure.harness import Turn, until_interrupted
from foretoken.measure.machine import machine
from foretoken.measure.report import Report, Spread
from foretoken.measure.teacher_forcing import logits_at
from foretoken.models.causal_lm import CausalLM
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.named import located
from foretoken.models.packed import dequantised_model

OURS, THEIRS = "ours", "llama.cpp"
WINDOW = 512  # tokens of a text that are read at once for its probabilities
CONTEXT = 64  # committed tokens before the nodes
NOTES = [
    "ms: of one forward, median (lowest to highest) of the rounds. x: times as fast as llama.cpp, median of ratios "
    "taken inside a round.",
    "A prompt is one forward of so many nodes after one token; plain decoding is one node, a batch one node of each.",
]


@dataclass
class LlamaCpp:
    """A forward of llama.cpp. It is given no trees: the nodes are a chain, which costs the same.

    api: the module llama_cpp. model: the address of the loaded model.
    """

    api: Any
    model: Any
    threads: int
    vocab_size: int
    context: Any = field(init=False, default=None)
    start: int = field(init=False, default=0)
    batch: int = field(init=False, default=1)

    def open(self, context: int, batch: int, nodes: int) -> None:
        api = self.api
        if self.context is not None:
            api.llama_free(self.context)
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = (context + nodes) * batch + 64, batch
        settings.n_ubatch = max(512, nodes * batch)
        settings.n_batch = max(settings.n_ubatch, context * batch)  # the text before them is one call, too
        settings.n_threads = settings.n_threads_batch = self.threads
        self.context, self.start, self.batch = api.llama_init_from_model(self.model, settings), 0, batch
        if context:
            self.forward(context)
        self.start = context

    def forward(self, nodes: int) -> None:
        api, count = self.api, nodes * self.batch
        batch = api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = 1 + i % nodes * 37 % (self.vocab_size - 1)
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = self.start + i % nodes, 1, i // nodes
            batch.logits[i] = True  # those of every node, as ours are
        if api.llama_decode(self.context, batch):
            raise ForetokenError("llama.cpp could not run a forward.")
        api.llama_synchronize(self.context)
        api.llama_batch_free(batch)

    def forget(self) -> None:
        memory = self.api.llama_get_memory(self.context)
        for row in range(self.batch):
            self.api.llama_memory_seq_rm(memory, row, self.start, -1)


def llama_cpp(file: str, threads: int, vocab_size: int) -> LlamaCpp | None:
    """llama.cpp with a file, None where it is not installed."""
    if find_spec("llama_cpp") is None:
        return None
    import llama_cpp as api  # pyright: ignore[reportMissingImports]

    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    if not model:
        raise ForetokenError(f"llama.cpp cannot load {file}.")
    return LlamaCpp(api, model, threads, vocab_size)


@dataclass(frozen=True)
class Distance:
    """What rounding rows to 8 bits changes: total variation from the float32 model's laws over the tokens of a text
    (mean, and the value that 1% exceed), and the perplexities of both."""

    num_tokens: int
    mean_tv: float
    high_tv: float
    perplexity: float
    float32_perplexity: float


@torch.inference_mode()
def distance(lm: CausalLM, plain: Any, ids: Sequence[int]) -> Distance:
    """plain: transformers' own model with the same weights in float32."""
    apart: list[Tensor] = []
    losses: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(ids) - 1, WINDOW):
        part = list(ids[start : start + WINDOW])
        ours = logits_at(lm, [part], [(0, place) for place in range(len(part))], lm.vocab_size).log_softmax(-1)
        theirs = plain(torch.tensor([part])).logits[0].log_softmax(-1)
        apart.append((ours.exp() - theirs.exp()).abs().sum(-1) / 2)
        target = torch.tensor(part[1:])[:, None]
        losses.append((-ours[:-1].gather(1, target), -theirs[:-1].gather(1, target)))
    tv = torch.cat(apart)
    ppl = [float(torch.cat([pair[i] for pair in losses]).mean().exp()) for i in range(2)]
    return Distance(len(tv), float(tv.mean()), float(tv.quantile(0.99)), *ppl)


def report(
    header: dict[str, Any], turns: Sequence[Turn[Round, float]], apart: Distance | None, interrupted: bool
) -> Report:
    """A table of forwards, and one of the distance from the float32 model."""
    found = Report("benchmarks quantised", header, [], interrupted)
    table = found.table("forwards", ["nodes", "context", "batch", "ours ms", "ours tokens/s", "llama.cpp ms", "x"])
    for place in dict.fromkeys(turn.block.place for turn in turns):
        here = [turn for turn in turns if turn.block.place == place]
        ms = {name: {t.block.number: 1e3 * t.result for t in here if t.name == name} for name in (OURS, THEIRS)}
        ours = Spread.of(list(ms[OURS].values()))
        speed, theirs, ratio = 1e3 * place.nodes * place.batch / ours.median, "", ""
        if ms[THEIRS]:
            theirs = Spread.of(list(ms[THEIRS].values())).show(2)
            ratio = f"{median(other / ms[OURS][number] for number, other in ms[THEIRS].items()):.2f}"
        table.add(place.nodes, place.context, place.batch, ours.show(2), f"{speed:.1f}", theirs, ratio)
    table.notes = NOTES
    if apart is not None:
        columns = ["tokens", "mean TV", "TV exceeded by 1%", "perplexity", "perplexity in float32"]
        found.table("rows in 8 bits beside float32, weights the same", columns).add(
            apart.num_tokens, f"{apart.mean_tv:.5f}", f"{apart.high_tv:.5f}", f"{apart.perplexity:.4f}",
            f"{apart.float32_perplexity:.4f}",
        )  # fmt: skip
    return found


def command(
    target: str,
    /,
    *,
    nodes: str = "1,5,9",
    batch: str = "8,16",
    prompt: str = "64,512",
    rounds: int = 9,
    threads: int = 2,
    text: str | None = None,
    num_tokens: int = 2048,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Milliseconds of forwards beside llama.cpp's, in turns, and total variation and perplexity beside float32.

    target: A GGUF file.
    nodes: Tree nodes of a forward of one sequence, with commas.
    batch: Sequences with one node each, with commas.
    prompt: Tokens of prompts, with commas.
    rounds: Turns of each at every place, three forwards each.
    threads: Of both.
    text: File of real text on which the laws are compared.
    num_tokens: Tokens of it.
    """
    places = [Place(n, CONTEXT, 1) for n in numbers(nodes, "nodes")]
    places += [Place(1, CONTEXT, n) for n in numbers(batch, "batch")]
    places += [Place(n, 1, 1) for n in numbers(prompt, "prompt")]
    check_counts(rounds=rounds, threads=threads, num_tokens=num_tokens)
    options.quiet()
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    file = located(target)
    lm = load_model(file, device)
    now = seconds(WALL, device)
    header = {**machine(device), "target": target, "threads": threads, "memory_gb_s": memory_bandwidth(device, now)}
    paths: dict[str, Path] = {OURS: OurPath(lm)}
    theirs = llama_cpp(file, threads, lm.vocab_size)
    if theirs is not None:
        paths[THEIRS] = theirs
    done: list[Turn[Round, float]] = []
    interrupted = until_interrupted(measure(paths, places, rounds, now, options.progress), done)
    apart = None
    if text is not None and not interrupted:
        encode: Callable[[str], list[int]] = load_tokenizer(file).encode
        plain = dequantised_model(file, torch.float32).eval()
        apart = distance(lm, plain, encode(File(text).read_text(encoding="utf-8"))[:num_tokens])
    show(report(header, done, apart, interrupted), json_, markdown)
