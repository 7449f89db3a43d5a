"""`foretoken bench execution`: what one forward costs."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.core.limits import check_counts

if TYPE_CHECKING:
    from foretoken.bench.execution import Timing

DEFAULT_OUT = "foretoken-execution.jsonl"


def execution(
    target: options.Target = None,
    nodes: Annotated[str, typer.Option(help="Tree nodes of a forward, with commas.")] = "1,2,4,8,16,24,32,48,64",
    context: Annotated[str, typer.Option(help="Committed tokens before them, with commas.")] = "256,128,512,1024,2048",
    batch: Annotated[str, typer.Option(help="Rows side by side, with commas.")] = "1,4,8",
    rounds: Annotated[int, typer.Option(help="Turns of every path at every place, three forwards each.")] = 9,
    expand: Annotated[
        str | None,
        typer.Option(help="Give the target the cost of a model of 100m, 300m or 1b parameters, at the same function."),
    ] = None,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Also torch.compile, which takes up to minutes for every shape.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights of an expanded target.")] = 0,
    out: Annotated[str, typer.Option(help="File for the single turns, JSONL; replaced if it exists.")] = DEFAULT_OUT,
    plot: Annotated[str | None, typer.Option(help="Draw the curves to this file (needs matplotlib).")] = None,
    json_: options.Json = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Milliseconds of one forward over nodes, context and batch: transformers, our eager path, our compiled one.

    Nodes are compared at the first context and batch named, contexts and batches at 1 and 8 nodes. Interleaved in one
    process; the table goes to stdout. For a model that runs in one thread on a CPU the clock is the thread's own.
    """
    shape = [numbers(nodes, "nodes"), numbers(context, "context"), numbers(batch, "batch")]
    check_counts(rounds=rounds)
    options.check_outputs(out, plot)
    options.check_models(target, None, expand, dtype=dtype)
    from foretoken.bench.execution import clock_named, measure, memory_bandwidth, seconds, summarise
    from foretoken.bench.execution_report import Report
    from foretoken.bench.execution_report import plot as draw
    from foretoken.bench.forwards import Curves, load_forwards
    from foretoken.bench.machine import machine
    from foretoken.bench.report import Lines

    options.quiet()
    curves = Curves(*shape)
    target, _ = options.resolve_models(target, None)
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
    with Lines(out, header) as lines:
        interrupted = lines.collect(measure(forwards.paths, curves.places, rounds, now, options.progress), done)
    options.progress("")
    print(f"{len(done)} turns written to {out}", file=sys.stderr)
    paths = {path.name: path.what for path in forwards.paths}
    report = Report(header | {"paths": paths, "rounds": rounds}, curves, summarise(done), interrupted)
    if json_:
        print(json.dumps(report.json()))
    else:
        report.print()
    if plot is not None:
        draw(report, plot)
    if interrupted:
        raise typer.Exit(130)


def numbers(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ForetokenError(f"--{name} is {text!r}: give whole numbers with commas between them.") from None
