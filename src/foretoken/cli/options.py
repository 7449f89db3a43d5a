"""Groups of options that several commands share, and the engine that they name."""

import gc
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

import foretoken
from foretoken.catalogue.kept import nothing_kept
from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file, read_text
from foretoken.core.lazy import uncollected
from foretoken.core.limits import check_counts, check_sampling, check_seed, check_stops
from foretoken.core.messages import Message
from foretoken.models.folder import check_template
from foretoken.models.named import OFF, check_device, located, surely_cpu
from foretoken.recipe import AUTO, FIXED, check_engine, in_a_row, is_word
from foretoken.trees.forms import with_absolute_file

if TYPE_CHECKING:  # torch takes seconds to import; --help must not wait for it
    from foretoken.engine import Engine
    from foretoken.models.grammar import Grammar
    from foretoken.profile import Profile as TunedProfile

SMALL = 20_000_000  # parameters below which one thread is used; measured on the demo target: docs/benchmarks.md


@dataclass(frozen=True)
class Models:
    """Which models run, and on what.

    target: Model folder (Hugging Face), GGUF file, hub id, or a name that `foretoken fetch` lists. Default: the demo
        target.
    drafter: Model folder, GGUF file or hub id, with the target's vocabulary or another one; folder of a draft
    head; "self" (the target's own weights in 4 bits), "mtp" (the layer of multi-token prediction that some models are
    published with), "ngram" (lookup in the text), "suffix" (lookup in the text and in those of earlier requests),
    "suffix+self" and so on (a lookup, then a model where that finds little), "none", or "auto": ngram; but where the
    compiled kernel runs weights of 16 or 32 bits, self, or under --method auto without a profile ngram+self. Default:
    the demo drafter for the demo target, else auto.
    device: cpu, cuda, cuda:N. Default: the first accelerator, else cpu.
    dtype: float32, bfloat16, float16. Default: the checkpoint's own; for one in float16 float32 on a CPU.
    """

    target: str | None = None
    drafter: str | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class EngineModels(Models):
    """vocab: How a drafter with another vocabulary drafts: $vocabs. Default: auto. See `foretoken vocab`.
    compile: auto: the fastest path that needs no waiting; on a GPU, CUDA graphs. on: also torch.compile, on a GPU and
    where there is no kernel of ours (up to minutes for every new shape, kept on disk). off: plain torch.
    """

    vocab: str | None = None
    compile: str = AUTO


@dataclass(frozen=True)
class PackedModels(EngineModels):
    """quantise: Pack the weights of model folders as they are loaded: $kinds. See docs/models-and-hardware.md.
    quantise_drafter: The same for a drafter model alone, which changes its speed and never the law of the text; none
    leaves its weights as they are. Default: that of --quantise, else $drafting where the compiled kernel runs the
    drafter and no dtype is named.
    """

    quantise: str | None = None
    quantise_drafter: str | None = None


@dataclass(frozen=True)
class RecipeOptions(PackedModels):
    """What is drafted, and which rule decides.

    tree: Token tree: $trees. See docs/trees-and-rules.md.
    verifier: Rule: $rules. See docs/trees-and-rules.md. Default: block for chains; traversal for trees that branch,
    block-transport for budget trees; exact-match for ngram, suffix, slem and dynamic trees.
    law: How children are drawn: $laws. Default: the verifier's.
    draft_probability: Randomised drafting: a coin of this probability before each draw; where none is made, drafter and
    target run at the same time. See docs/theory.md.
    """

    tree: str | None = None
    verifier: str | None = None
    law: str | None = None
    draft_probability: float | None = None


@dataclass(frozen=True)
class EngineOptions(RecipeOptions):
    """Which models, and how they decode; for commands that write text.

    tree: Token tree: $trees. See docs/trees-and-rules.md. Default: chain:5, or with --method auto chain:20 as the
    largest; for ngram and suffix chain:24.
    method: fixed: draft the tree at every step. auto: draft it as far as pays, step by step, and decode plainly
    where nothing pays. It goes by measured times, so at temperature > 0 a seed fixes the text only where drafts
    are matched exactly, or with --profile, whose costs it takes instead. Default: auto, but fixed where a tree,
    verifier, law or draft probability is named, or a seed without a profile.
    profile: Profile file of `foretoken tune`: the best tree and verifier it found, where none are named; method auto
    takes its costs and chooses the depth itself.
    suffix_store: File that keeps the texts of earlier requests, which drafter suffix looks up, for the next run.
    """

    method: str | None = None
    profile: str | None = None
    suffix_store: str | None = None

    def of(self, model: str | None) -> "EngineOptions":
        """Return these options for a model that is named by a word, as `--target` may name it; None: there is none.

        Raises ForetokenError where both are given.
        """
        if model is not None and self.target is not None:
            raise ForetokenError(f"Both {model} and --target {self.target} are given: name one of them.")
        return self if model is None else replace(self, target=model)

    def load(self, seed: int | None, max_batch: int) -> "Engine":
        """Return the engine that the options name; seed: as in `named`; max_batch: as in `foretoken.load`."""
        return load_engine(**self.named(seed), max_batch=max_batch)

    def check_chat(self, conversations: Mapping[str, Sequence[Message]]) -> None:
        """Refuse, before torch is imported, what the model's chat template does not take.

        conversations: as in `check_template`.
        """
        target, _ = resolve_models(self.target, self.drafter)
        check_template(located(target), conversations)

    def named(self, seed: int | None) -> dict[str, Any]:
        """Return the options as `load_engine` takes them, the method filled in. seed: the one asked for, if any."""
        chosen = self.tree, self.verifier, self.law, self.draft_probability
        fixed = any(x is not None for x in chosen) or (seed is not None and self.profile is None)
        usual = FIXED if fixed else AUTO
        return {**vars(self), "method": usual if self.method is None else self.method}

    def anywhere(self) -> "EngineOptions":
        """Return these options for a process that runs in another folder: files and folders have absolute paths.

        Raises ForetokenError for options that cannot be, or cannot be used in another process.
        """
        check_models(**self.named(None))
        if self.suffix_store is not None:
            raise ForetokenError(f"suffix_store {self.suffix_store} is kept by one process: leave it out, or --ray.")
        paths = {name: getattr(self, name) for name in ("target", "drafter", "profile")}
        first, paths["drafter"] = in_a_row(self.drafter)
        named = {name: str(path) for name, path in paths.items() if not is_word(path)}
        here = {name: str(Path(path).absolute()) for name, path in named.items() if Path(path).exists()}
        if first is not None and "drafter" in here:
            here["drafter"] = f"{first}+{here['drafter']}"
        return replace(self, **here, tree=self.tree and with_absolute_file(self.tree))


@dataclass(frozen=True)
class RayOptions:
    """ray: Work on a Ray cluster with so many engines, each in a process of its own, on whichever machine has room.
    Needs the extra "cluster"; see docs/serving.md.
    ray_cpus: Cores that each engine on Ray takes, and threads that it uses. With --device cuda it takes a GPU too.
    """

    ray: int | None = None
    ray_cpus: int = 1

    def __post_init__(self) -> None:
        check_counts(ray=self.ray, ray_cpus=self.ray_cpus)

    def resources(self, device: str | None) -> dict[str, int]:
        """Return the numbers of cores and GPUs that each engine takes, as num_cpus and num_gpus.

        Raises ForetokenError for a device, from --device, that names one GPU; on "cuda" an engine takes a GPU.
        """
        if (device or "").startswith("cuda:"):
            raise ForetokenError(f"--device {device} names one GPU, and Ray gives each engine one: say --device cuda.")
        return {"num_cpus": self.ray_cpus, "num_gpus": int((device or "").startswith("cuda"))}


@dataclass(frozen=True)
class TextOptions:
    """How tokens are drawn, and where a text ends.

    system: System message before the user's; with generate it implies --chat.
    temperature: 0 is greedy; 1 is the model's own distribution. Sampling settings in the model's generation config are
    not used.
    top_k: Keep the k likeliest tokens; 0 keeps all.
    top_p: Keep the likeliest tokens with this mass.
    min_p: Drop tokens below this share of the best one's probability.
    repetition_penalty: Divide scores of tokens seen before.
    frequency_penalty: Subtract this for every earlier occurrence.
    presence_penalty: Subtract this once from tokens generated before.
    stop: End the text before this string; may be repeated.
    json_schema: File of a JSON schema; the text is JSON that fits it. Needs the extra "grammar".
    regex: The text matches this regular expression as a whole. Needs the extra "grammar".
    max_new_tokens: Most tokens to generate.
    seed: Random seed; with a named tree the same seed gives the same text. Where no method is named, a seed without a
    profile means method fixed, and drafter auto then means self or ngram alone. Default: a fresh one.
    show_drafts: Tint the text: drafted and accepted tokens, tokens that correct a rejected draft, and bonus tokens.
    Colours need a terminal, or FORCE_COLOR=1; NO_COLOR is respected.
    """

    system: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    max_new_tokens: int = 256
    seed: int | None = None
    show_drafts: bool = False

    def check(self, num_texts: int = 1) -> None:
        """Refuse values that are out of range, before models are loaded. num_texts: number of texts to be written."""
        check_counts(max_new_tokens=self.max_new_tokens)
        check_seed(self.seed, num_texts)
        check_sampling(**self._sampling())
        check_stops(self.stop or ())
        _ = self.grammar  # which refuses one that cannot be

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`. Their seed is the one asked for, else a fresh one."""
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        return {
            **self._sampling(),
            "stop": tuple(self.stop or ()),
            "grammar": self.grammar,
            "max_new_tokens": self.max_new_tokens,
            "seed": seed,
        }

    @cached_property
    def grammar(self) -> "Grammar | None":
        """The grammar that the text is held to, if there is one."""
        if self.json_schema is None and self.regex is None:
            return None
        if self.json_schema is not None and self.regex is not None:
            raise ForetokenError("--json-schema and --regex both say what the text must be: leave one out.")
        schema = None if self.json_schema is None else read_text(self.json_schema, "the JSON schema")
        from foretoken.models.grammar import Grammar  # which imports torch

        return Grammar.json_schema(schema) if schema is not None else Grammar.regex(str(self.regex))

    def _sampling(self) -> dict[str, Any]:
        """Return the settings that both `check_sampling` and `Engine.generate` take."""
        return {name: getattr(self, name) for name in signature(check_sampling).parameters if name != "logit_bias"}


class DefaultCommand(TyperGroup):
    """A group of commands whose first one runs where none is named; --help of the group is that of the first, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words `args` after the group's name, and return the command's; ctx: click's context."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [next(iter(self.commands)), *args])


def demo_folder() -> Path:
    """Return the folder of the demo models: inside an installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "demo", package.parents[1] / "models"):
        if (folder / "target" / "config.json").exists():
            return folder
    raise ForetokenError("The demo models are not installed: name a model folder with --target.")


def resolve_models(target: str | None, drafter: str | None) -> tuple[str, str]:
    """Return the names of the target and the drafter, defaults filled in where they are None.

    target: the demo target by default.
    drafter: by default the demo drafter for the demo target, "auto" for another one.
    """
    if target is None:
        return str(demo_folder() / "target"), str(demo_folder() / "drafter") if drafter is None else drafter
    return target, AUTO if drafter is None else drafter


def check_models(
    target: str | None, drafter: str | None, profile: str | None = None, device: str | None = None, **named: Any
) -> None:
    """Refuse, before torch is imported, models, trees, rules and the like that cannot be.

    target, drafter: their names; None: the defaults of `resolve_models`.
    profile: a profile's file, which must be readable; None: there is none.
    device: a device's name; None: the default.
    named: further options, as `recipe.check_engine` takes them.
    """
    from foretoken.profile import read_profile

    check_device(device)
    target, drafter = resolve_models(target, drafter)
    check_engine(target, drafter, **named)
    if profile is not None:
        read_profile(profile)


@uncollected()
def load_engine(
    target: str | None, drafter: str | None, *, profile: str | None = None, device: str | None = None,
    max_batch: int = 8, **named: Any,
) -> "Engine":  # fmt: skip
    """Return the engine, after a check of all that can be refused without torch.

    target, drafter, profile, device: as in `check_models`.
    max_batch, named: further options, as `foretoken.load` takes them.
    """
    check_models(target, drafter, profile, device, **named)
    if surely_cpu(device) and named.get("compile") != OFF and nothing_kept():
        from foretoken.kernel.compile import compile_ahead  # imports numba

        compile_ahead()  # while torch is imported, which takes seconds
    from foretoken.models.packed import num_weights
    from foretoken.profile import read_profile

    quiet()
    target, drafter = resolve_models(target, drafter)
    if profile is not None:
        spare_threads_as(read_profile(profile))
    engine = foretoken.load(target, drafter=drafter, profile=profile, device=device, max_batch=max_batch, **named)
    if profile is None:
        spare_threads(num_weights(engine.target.lm.weights))
    gc.freeze()  # what is imported and loaded by now stays, so that garbage collection need not look through it
    return engine


def quiet() -> None:
    """Silence the warnings and progress bars of transformers; print one line where loops must be compiled."""
    import transformers

    from foretoken.kernel.compile import when_compiling

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    when_compiling(tell_of_compiling)


@cache
def tell_of_compiling() -> None:
    """Print, once per process, that loops are being compiled."""
    print("foretoken: compiling machine code, which is kept: seconds, or a minute at the first start", file=sys.stderr)


def spare_threads(num_parameters: int) -> None:
    """Have torch use one thread for a model of few parameters, unless OMP_NUM_THREADS is set.

    A second thread brings such a model nothing, and stalls it whenever another program wants a core.

    num_parameters: the model's.
    """
    import torch

    if num_parameters < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def spare_threads_as(profile: "TunedProfile") -> None:
    """Have torch use no more threads than the `profile`, whose costs hold for them, unless OMP_NUM_THREADS is set."""
    import torch

    threads = profile.host.get("threads", "")
    if "OMP_NUM_THREADS" not in os.environ and threads.isdecimal() and 0 < int(threads) < torch.get_num_threads():
        torch.set_num_threads(int(threads))


def heldout_prompts(count: int | None = None) -> list[dict[str, str]]:
    """Return the first `count` (None: all) of the held-out texts: each has an id, a file, a prompt and a reference."""
    try:
        found = [json.loads(line) for line in (demo_folder() / "heldout.jsonl").read_text().splitlines()]
    except OSError as error:
        raise ForetokenError(f"Cannot read the held-out prompts: {error.strerror} ({error.filename}).") from error
    if count is not None and not 1 <= count <= len(found):
        raise ForetokenError(f"Cannot take {count} held-out prompts: there are {len(found)}, take 1 or more.")
    return found[:count]


def check_own(out: str, keys: tuple[str, ...], what: str) -> None:
    """Refuse, before models are loaded, an output file `out` that cannot be written or must not be replaced.

    An earlier run's file, or an empty one, may be replaced.

    keys: those of the first JSON value in an earlier run's file.
    what: what such a file is called in errors.
    """
    path = Path(out)
    check_file(path)
    if path.exists() and not path.is_file():
        raise ForetokenError(f"Cannot write {out}: it is not an ordinary file.")
    if path.exists() and path.stat().st_size:
        try:
            record, _ = json.JSONDecoder().raw_decode(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not record.keys() >= set(keys):
            raise ForetokenError(f"{out} is not a {what}, and would be replaced: name another --out.")


def progress(line: str) -> None:
    """Print `line` on stderr: on a terminal it replaces the line before, elsewhere each call prints a new one."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
