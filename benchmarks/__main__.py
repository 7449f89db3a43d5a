"""`python -m benchmarks NAME`: runs one of the scripts beside this file; without a name it lists them."""

import sys
from importlib import import_module

import typer

from foretoken.cli.command import FORMS, command, field_help
from foretoken.cli.main import run
from foretoken.cli.measuring import WorkOptions
from foretoken.cli.options import EngineOptions
from foretoken.core.errors import ForetokenError

SCRIPTS = {
    "compare": "plain decoding beside ways to draft, each named with options of foretoken.load",
    "execution": "milliseconds of one forward, over nodes, context and batch",
    "quantised": "a GGUF file in our kernel beside llama.cpp, and what rounding rows to 8 bits costs",
    "arena": "drafters, trees and rules at equal numbers of nodes: expected accepted tokens, and speed",
    "heads": "tokens per step, speed and time by component of draft heads",
    "vocab": "every method of drafting with another vocabulary, and whether it is lossless",
    "auto": "method auto beside plain decoding and fixed depths: good, useless and changing drafters",
    "rules": "acceptance, time and deviation of every verification rule",
    "optimum": "share of the best that any joint rule can accept, on trees small enough to enumerate",
    "reproduce": "tables and figures of the papers, beside ours",
    "repetitive": "texts that repeat their prompts or each other, by lookups alone and before a model",
    "randomised": "the draft probability that pays, predicted and measured",
    "peers": "ours, plain and drafted, beside transformers, llama.cpp and OpenVINO with the same model",
    "serving": "servers under load: tokens per second, time to the first token and between tokens",
    "soak": "a server under users who come, go and send nonsense: texts, memory and errors",
    "expand": "writes a model with the target's function at the cost of a larger one",
}
SHARED = FORMS | field_help(EngineOptions) | field_help(WorkOptions)  # options that mean what they do in the package


def main() -> object:
    """What the script's command line gives, see cli.main.run."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--help":
        for known, what in SCRIPTS.items():
            print(f"{known:12}{what}")
        return None
    if name not in SCRIPTS:
        raise ForetokenError(f"There is no benchmark {name}: choose one of {', '.join(SCRIPTS)}.")
    return script(name)(sys.argv[2:], prog_name=f"python -m benchmarks {name}", standalone_mode=False)


def script(name: str) -> typer.Typer:
    """The command line of one of SCRIPTS."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(import_module(f"benchmarks.{name}").command, SHARED))
    return app


if __name__ == "__main__":
    run(main)
