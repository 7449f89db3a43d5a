"""`python -m benchmarks peers`: greedy answers to chat questions, ours beside other programs with the same model.

transformers runs in this process. Programs that speak OpenAI's protocol are started first, each with the same weights
and number of threads, and named; OpenVINO GenAI is used where it can be imported and its model is named:

    llama-server -m model-bf16.gguf -t 2 --port 8002 &
    python -m benchmarks peers --server llama.cpp=http://127.0.0.1:8002 --openvino model-bf16 --plot speed.svg

One sequence at a time, answers all of one length, and every program meets a prompt before any meets the next one.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.serving import Server, all_at_once, conversations, served
from foretoken.build import load, plain
from foretoken.cli import options
from foretoken.cli.measuring import encoded, show
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts
from foretoken.engine import Engine
from foretoken.measure.harness import WARM_TOKENS, Block, Turn, blocks, interleave, until_interrupted
from foretoken.measure.machine import machine
from foretoken.measure.methods import OURS, THEIRS, Foretoken, Method, Transformers
from foretoken.measure.pair import theirs_of
from foretoken.measure.plot import OUR_COLOR, THEIR_COLOR, Bar, Panel, check_plot
from foretoken.measure.plot import plot as draw
from foretoken.measure.report import Report, Spread
from foretoken.recipe import AUTO, NGRAM, OWN

LLAMA, OPENVINO = "llama.cpp", "OpenVINO"
MODULE = "openvino_genai"
DEFAULT_MODEL = "smollm2-135m-instruct"
WORKLOAD = str(Path(__file__).resolve().parents[1] / "models" / "chat-prompts.jsonl")
# Answers do not stop at the end of a text; llama.cpp shall read a prompt again that it has read before.
FIELDS = {LLAMA: {"ignore_eos": True, "cache_prompt": False}}
OTHER_FIELDS = {"ignore_eos": True}
COLUMNS = ["program", "tokens/s", "x transformers", "x plain", "tokens per step", "same text as plain"]
NOTES = [
    "tokens/s: of whole answers, prompt included. Medians (lowest to highest); ratios are taken on the same prompt in "
    "the same round. x plain: over foretoken without a drafter.",
    "same text as plain: answers whose ids are those of foretoken without a drafter. -: the program sends no ids.",
]


@dataclass(frozen=True)
class Answered:
    """One answer.

    num_tokens: new tokens. seconds: wall clock from the call to the return. num_steps: forwards of the target; None
    where the program does not say. ids: the new tokens; None where it does not send them. decoding_tokens_per_s: tokens
    per second after the first step, which reads the prompt; None where there was no other one, or it is not measured.
    """

    num_tokens: int
    seconds: float
    num_steps: int | None = None
    ids: list[int] | None = None
    decoding_tokens_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole run."""
        return self.num_tokens / self.seconds


Peer = Callable[[int, int], Answered]  # of the prompt's number and the number of new tokens
Turns = Sequence[Turn[Block, Answered]]


@dataclass(frozen=True)
class Row:
    """One program over all prompts and rounds.

    vs_plain, vs_transformers: ratios of tokens/s to ours without a drafter and to transformers.
    num_same: answers with the ids of ours without a drafter; None where the program sends no ids.
    """

    name: str
    num_answers: int
    num_tokens: int
    tokens_per_s: Spread
    vs_plain: Spread | None
    vs_transformers: Spread | None
    tokens_per_step: float | None
    num_same: int | None


def rows(turns: Turns) -> list[Row]:
    """A row for each program, in the order in which they first came."""
    found: dict[str, dict[int, Answered]] = {}
    for turn in turns:
        found.setdefault(turn.name, {})[turn.block.number] = turn.result
    speeds = {name: {i: a.num_tokens / a.seconds for i, a in each.items()} for name, each in found.items()}

    def ratios(name: str, base: str) -> Spread | None:
        shared = [i for i in speeds[name] if i in speeds.get(base, {})]
        return Spread.of([speeds[name][i] / speeds[base][i] for i in shared]) if shared else None

    made = []
    for name, answers in found.items():
        tokens, steps = sum(a.num_tokens for a in answers.values()), [a.num_steps for a in answers.values()]
        alone = found.get(OURS, {})
        same = [a.ids == alone[i].ids for i, a in answers.items() if a.ids is not None and i in alone]
        made.append(
            Row(
                *(name, len(answers), tokens, Spread.of(list(speeds[name].values()))),
                *(ratios(name, OURS), ratios(name, THEIRS)),
                tokens_per_step=None if None in steps else tokens / sum(filter(None, steps)),
                num_same=sum(same) if same else None,
            )
        )
    return made


def in_process(method: Method, ids: Sequence[list[int]]) -> Peer:
    """Ours, or transformers."""

    def answer(prompt: int, new: int) -> Answered:
        return answered(method, ids[prompt], new, 0.0, 0)

    return answer


def answered(method: Method, ids: list[int], new: int, temperature: float, seed: int) -> Answered:
    """One answer by ours or transformers. ids: of the prompt. new: tokens."""
    run = method.run([ids], new, temperature, seed)
    counts = run.num_tokens, run.wall_s, run.num_target_forwards
    return Answered(*counts, run.texts[0], run.decoding_tokens_per_s)


def remote(name: str, server: Server, prompts: Sequence[Any]) -> Peer:
    """A program that speaks OpenAI's protocol."""
    fields = FIELDS.get(name, OTHER_FIELDS)

    def answer(prompt: int, new: int) -> Answered:
        load = asyncio.run(all_at_once(server, [prompts[prompt]], new, 0.0, **fields))
        return Answered(load.answers[0].tokens, load.wall_s)

    return answer


def in_openvino(path: str, ids: Sequence[list[int]]) -> Peer:
    """OpenVINO GenAI with a GGUF file or the folder of an exported model."""
    genai: Any = import_module(MODULE)
    tensor: Any = import_module("openvino").Tensor
    try:
        pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=torch.get_num_threads())
    except RuntimeError as error:
        raise ForetokenError(f"OpenVINO cannot load {path}: {str(error).strip().splitlines()[-1]}") from error
    settings = genai.GenerationConfig()
    settings.do_sample, settings.ignore_eos, settings.apply_chat_template = False, True, False

    def answer(prompt: int, new: int) -> Answered:
        settings.max_new_tokens = new
        given = torch.tensor([ids[prompt]])
        inputs = genai.TokenizedInputs(tensor(given.numpy()), tensor(torch.ones_like(given).numpy()))
        begin = time.perf_counter()
        (new_ids,) = pipeline.generate(inputs, settings).tokens
        return Answered(len(new_ids), time.perf_counter() - begin, None, new_ids)

    return answer


def ours(target: str) -> dict[str, Engine]:
    """Ours without a drafter, and under method auto with those that need no second model; no answer stops early."""
    own = replace(load(target, drafter=OWN, method=AUTO, device="cpu", max_batch=1), eos_ids=frozenset())
    model, tokenizer = own.target.lm.model, own.tokenizer
    lookup = load(model, drafter=NGRAM, method=AUTO, tokenizer=tokenizer, max_batch=1)
    lookup = replace(lookup, eos_ids=frozenset())
    return {OURS: plain(own), f"{OURS}, drafter {OWN}": own, f"{OURS}, drafter {NGRAM}": lookup}


def picture(header: Mapping[str, Any], found: Sequence[Row], path: str) -> None:
    """Bars of the tokens/s, with model, machine and date above them."""
    bars = [
        Bar(row.name, row.tokens_per_s, OUR_COLOR if row.name.startswith(OURS) else THEIR_COLOR)
        for row in reversed(found)
    ]
    title = (
        f"{Path(header['target']).name}, {header['dtype']}, greedy answers, one sequence\n"
        f"{header['cpu']}, {header['threads']} threads, {header['date']}"
    )
    draw([Panel("", "tokens per second: median, lowest and highest", "", bars)], title, path)


def report(header: Mapping[str, Any], found: Sequence[Row], left_out: Sequence[str], interrupted: bool) -> Report:
    """The table. left_out: programs that were not measured, each with the reason."""
    figures = {"rows": [asdict(row) for row in found], "left_out": list(left_out)}
    made = Report("benchmarks peers", header, [], interrupted, figures)
    table = made.table("Greedy answers, one sequence", COLUMNS, 2)
    table.notes = [*NOTES, *([f"Left out: {'; '.join(left_out)}."] if left_out else [])]
    for row in found:
        ratios = ("-" if of is None else of.show(2) for of in (row.vs_transformers, row.vs_plain))
        same = None if row.num_same is None else f"{row.num_same} of {row.num_answers}"
        table.add(row.name, row.tokens_per_s.show(0), *ratios, row.tokens_per_step, same)
    return made


def command(
    *,
    target: str = DEFAULT_MODEL,
    workload: Annotated[
        str,
        typer.Option(
            help='JSONL of prompts, {"prompt": "..."} or {"messages": [...]} per line. Default: the chat questions in '
            "models/chat-prompts.jsonl.",
            show_default=False,
        ),
    ] = WORKLOAD,
    prompts: int = 6,
    max_new_tokens: int = 128,
    rounds: int = 3,
    server: Annotated[
        list[str] | None,
        typer.Option(help=f"NAME=URL of a running server, as {LLAMA}=http://127.0.0.1:8002; may be repeated."),
    ] = None,
    openvino: str | None = None,
    plot: str | None = None,
    markdown: bool = False,
    json_: bool = False,
) -> None:
    """Greedy answers to chat questions: ours, plain and drafted, beside transformers and other programs, in turn.

    target: Model folder, GGUF file, or the name of a fetched one.
    prompts: Prompts of the workload that are answered.
    max_new_tokens: Tokens of each answer; end-of-text does not stop one.
    openvino: GGUF file or folder of the model for OpenVINO GenAI.
    plot: Draw the speeds to this file (needs matplotlib).
    """
    check_counts(rounds=rounds, max_new_tokens=max_new_tokens)
    asked = conversations(workload, prompts)
    options.check_models(target, OWN)
    check_plot(plot)
    if openvino is not None and find_spec(MODULE) is None:
        raise ForetokenError(f"--openvino {openvino} needs OpenVINO GenAI: pip install openvino-genai.")
    servers = served(server or [])
    left_out = [] if LLAMA in servers else [f"{LLAMA}: no --server {LLAMA}=URL"]
    left_out += [] if openvino else [f"{OPENVINO}: no --openvino PATH"]
    options.quiet()

    engines = ours(target)
    lm = engines[OURS].target.lm
    theirs = theirs_of(target, lm)
    ids = encoded(engines[OURS], asked, max_new_tokens)
    peers = {name: in_process(Foretoken(engine), ids) for name, engine in engines.items()}
    peers[THEIRS] = in_process(Transformers("plain", theirs), ids)
    peers |= {name: remote(name, each, asked) for name, each in servers.items()}
    if openvino is not None:
        peers[OPENVINO] = in_openvino(openvino, ids)
    header = {
        "date": date.today().isoformat(), **machine(lm.device), "target": target,
        "dtype": str(lm.dtype).removeprefix("torch."), "temperature": 0, "prompts": prompts,
        "max_new_tokens": max_new_tokens, "rounds": rounds,
        **{f"{name} runs": each.model for name, each in servers.items()},
        **({} if openvino is None else {f"{OPENVINO} runs": Path(openvino).name}),
    }  # fmt: skip
    done: list[Turn[Block, Answered]] = []
    turns = interleave(
        peers, blocks(rounds, len(ids), [0.0]), lambda peer, block: peer(block.prompt, max_new_tokens),
        lambda peer: peer(0, min(WARM_TOKENS, max_new_tokens)), options.progress,
    )  # fmt: skip
    interrupted = until_interrupted(turns, done)
    found = rows(done)
    if plot is not None:
        picture(header, found, plot)
    show(report(header, found, left_out, interrupted), json_, markdown)
