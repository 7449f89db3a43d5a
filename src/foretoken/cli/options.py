"""Options that several commands share, and the models they default to."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foretoken.core.errors import ForetokenError
from foretoken.core.messages import check_text
from foretoken.recipe import AUTO, SCHEMES, VOCABS, check_engine
from foretoken.trees.grammar import forms
from foretoken.verify import RULES

if TYPE_CHECKING:  # torch takes seconds to import; --help must not wait for it
    from foretoken.engine import Engine
    from foretoken.profile import Profile as TunedProfile

_told = False
Target = Annotated[str | None, typer.Option(help="Model folder (Hugging Face) or hub id. Default: the demo target.")]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Model folder or hub id with the same vocabulary, or another one with --vocab; folder of a draft head; "
        '"ngram" (prompt lookup), or "none". Default: the demo '
        "drafter for the demo target, else ngram."
    ),
]
SameVocabulary = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Model folder or hub id with the same vocabulary. Default: the demo drafter for the demo target.",
    ),
]
TREE_FORMS = f"Token tree: {', '.join(forms())}. See docs/trees.md."
Tree = Annotated[str, typer.Option(help=TREE_FORMS)]
LargestTree = Annotated[
    str | None, typer.Option(help=f"{TREE_FORMS} Default: chain:5, or with --method auto chain:12 as the largest.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help="fixed: draft the tree at every step. auto: cut it at the depth that pays, step by step, and decode "
        "plainly where nothing pays. It goes by measured times, so at temperature > 0 a seed fixes the text only with "
        "--profile, whose costs it takes instead. Default: auto, but fixed where a tree, verifier, law or draft "
        "probability is named, or a seed without a profile."
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help=f"Rule: {', '.join(RULES)}. See docs/verification.md. Default: block for chains; rrsw for trees that "
        "branch, block-transport for budget trees; exact-match for ngram, slem and dynamic trees."
    ),
]
Law = Annotated[
    str | None,
    typer.Option(help=f"How children are drawn: {', '.join(SCHEMES)}. Default: the verifier's."),
]
Vocab = Annotated[
    str | None,
    typer.Option(
        help=f"How a drafter with another vocabulary drafts: {', '.join([*VOCABS, AUTO])}. See `foretoken vocab`."
    ),
]
DraftProbability = Annotated[
    float | None,
    typer.Option(
        help="Randomised drafting: a coin of this probability before each draw; where none is made, drafter and target "
        "run at the same time. See docs/randomised-drafting.md."
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        help="Profile file of `foretoken tune`: the best tree and verifier it found, where none are named; method auto "
        "takes its costs and chooses the depth itself."
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N. Default: the first accelerator, else cpu.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16. Default: the checkpoint's own; for one in float16 float32 on a CPU."
    ),
]
Compile = Annotated[
    str,
    typer.Option(
        help="auto: the fastest path that needs no waiting. on: also torch.compile where there is no kernel of ours "
        "(up to minutes for every new shape, kept on disk). off: plain torch."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Seed = Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same text. Default: a fresh one.")]
SMALL = 20_000_000  # parameters; measured on the demo target (15 M): docs/results.md


class DefaultCommand(TyperGroup):
    """A group whose first command runs where none is named; the group's --help is that one's too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])


def demo_folder() -> Path:
    """The folder of the demo models: inside an installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "demo", package.parents[1] / "models"):
        if (folder / "target" / "config.json").exists():
            return folder
    raise ForetokenError("The demo models are not installed: name a model folder with --target.")


def heldout_prompts(count: int | None = None) -> list[dict[str, str]]:
    """The first held-out excerpts beside the demo models, by default all: id, file, prompt, reference."""
    import json

    try:
        found = [json.loads(line) for line in (demo_folder() / "heldout.jsonl").read_text().splitlines()]
    except OSError as error:
        raise ForetokenError(f"Cannot read the held-out prompts: {error.strerror} ({error.filename}).") from error
    if count is not None and not 1 <= count <= len(found):
        raise ForetokenError(f"Cannot take {count} held-out prompts: there are {len(found)}, take 1 or more.")
    return found[:count]


def check_outputs(out: str, plot: str | None = None) -> None:
    """Refuse, before models are loaded, files that cannot be written."""
    from foretoken.core.files import check_file
    from foretoken.measure.plot import check_plot

    check_file(Path(out))
    if plot is not None:
        check_plot(plot)


def resolve_models(target: str | None, drafter: str | None) -> tuple[str, str]:
    """Defaults: the demo pair; for another target prompt lookup, which fits every model."""
    if target is None:
        return str(demo_folder() / "target"), drafter or str(demo_folder() / "drafter")
    return target, drafter or "ngram"


def check_models(target: str | None, drafter: str | None, profile: str | None = None, **named: Any) -> None:
    """Refuse, before torch is imported, models, trees, rules and the like that cannot be. named: see check_engine."""
    from foretoken.profile import read_profile

    target, drafter = resolve_models(target, drafter)
    check_engine(target, drafter, **named)
    if profile is not None:
        read_profile(profile)


def check_prompts(prompts: list[str]) -> None:
    """Refuse empty ones and what is no text, before models are loaded."""
    for number, prompt in enumerate(prompts, start=1):
        which = f"Prompt {number}" if len(prompts) > 1 else "The prompt"
        if not prompt:
            raise ForetokenError(f"{which} is empty: give at least one token.")
        check_text(prompt, which)


def method_for(seed: int | None, profile: str | None, *named: object) -> str:
    """The method where none is asked for. named: tree, verifier and the like, None where they are not given."""
    fixed = any(x is not None for x in named) or (seed is not None and profile is None)
    return "fixed" if fixed else "auto"


def load_engine(
    target: str | None,
    drafter: str | None,
    tree: str | None,
    verifier: str | None,
    law: str | None,
    device: str | None,
    dtype: str | None,
    max_batch: int = 8,
    vocab: str | None = None,
    method: str = "fixed",
    compile: str = "auto",
    draft_probability: float | None = None,
    profile: str | None = None,
) -> "Engine":
    check_models(
        target, drafter, profile=profile, method=method, tree=tree, verifier=verifier, law=law, dtype=dtype,
        vocab=vocab, compile=compile, draft_probability=draft_probability,
    )  # fmt: skip
    from foretoken.build import load
    from foretoken.profile import read_profile

    quiet()
    target, drafter = resolve_models(target, drafter)
    if profile is not None:
        spare_threads_as(read_profile(profile))
    engine = load(
        target,
        drafter=drafter,
        method=method,
        tree=tree,
        verifier=verifier,
        law=law,
        device=device,
        dtype=dtype,
        max_batch=max_batch,
        vocab=vocab,
        compile=compile,
        draft_probability=draft_probability,
        profile=profile,
    )
    if profile is None:
        spare_threads(engine.target.lm.model.num_parameters())
    return engine


def quiet() -> None:
    """No warnings and progress bars of transformers among our own lines; but one line where loops must be compiled."""
    import transformers

    from foretoken.kernel.compile import when_compiling

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def compiling() -> None:
        global _told
        if not _told:
            _told = True
            print("foretoken: compiling for this machine, once: up to a minute of one core", file=sys.stderr)

    when_compiling(compiling)


def spare_threads(num_parameters: int) -> None:
    """One thread for a small model: a second brings it nothing, and stalls it whenever another program wants a core."""
    import torch

    if num_parameters < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def spare_threads_as(profile: "TunedProfile") -> None:
    """No more threads than the profile was made with, unless their number was asked for: its costs are of those."""
    import torch

    threads = profile.host.get("threads", "")
    if "OMP_NUM_THREADS" not in os.environ and threads.isdecimal() and 0 < int(threads) < torch.get_num_threads():
        torch.set_num_threads(int(threads))


def progress(line: str) -> None:
    """To stderr: one line that is overwritten on a terminal; one line a call elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
