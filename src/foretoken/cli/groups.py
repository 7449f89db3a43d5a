"""Groups of options that several commands share: a command takes a group as one argument, its users see the fields."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from foretoken.cli import options
from foretoken.core.limits import check_counts, check_sampling, check_seed, check_stops

if TYPE_CHECKING:
    from foretoken.engine import Engine

Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 is the model's own distribution.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens with this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide scores of tokens seen before.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtract this for every earlier occurrence.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract this once from tokens generated before.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
System = Annotated[str | None, typer.Option(help="System message before the user's; with generate it implies --chat.")]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts",
        help="Tint the text: drafted and accepted tokens, tokens that correct a rejected draft, and bonus tokens. "
        "Colours need a terminal, or FORCE_COLOR=1; NO_COLOR is respected.",
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """Which models, and how they decode; for commands that write text."""

    target: options.Target = None
    drafter: options.Drafter = None
    method: options.Method = None
    tree: options.LargestTree = None
    verifier: options.Verifier = None
    law: options.Law = None
    vocab: options.Vocab = None
    draft_probability: options.DraftProbability = None
    profile: options.Profile = None
    device: options.Device = None
    dtype: options.Dtype = None
    compile: options.Compile = "auto"

    def load(self, seed: int | None, max_batch: int) -> "Engine":
        """The engine. seed: the one asked for, which only method fixed or a profile keeps."""
        named = self.tree, self.verifier, self.law, self.draft_probability
        method = self.method or options.method_for(seed, self.profile, *named)
        return options.load_engine(
            *(self.target, self.drafter, self.tree, self.verifier, self.law, self.device, self.dtype, max_batch),
            *(self.vocab, method, self.compile, self.draft_probability, self.profile),
        )


@dataclass(frozen=True)
class TextOptions:
    """How tokens are drawn, and where a text ends."""

    system: System = None
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    stop: Stop = None
    max_new_tokens: MaxNewTokens = 256
    seed: options.Seed = None
    show_drafts: ShowDrafts = False

    def sampling(self) -> dict[str, Any]:
        """The arguments of `core.sampling.Sampling`."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Engine.generate`, besides the seed and the length."""
        return {"stop": tuple(self.stop or ()), **self.sampling()}

    def check(self, num_texts: int = 1) -> None:
        """Refuse values that are out of range, before models are loaded."""
        check_counts(max_new_tokens=self.max_new_tokens)
        check_seed(self.seed, num_texts)
        check_sampling(**self.sampling())
        check_stops(self.stop or ())

    def first_seed(self) -> int:
        """The seed of the first text: the one asked for, else a fresh one."""
        return random.randrange(2**31) if self.seed is None else self.seed


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose arguments of a dataclass type become one option per field."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=Parameter.KEYWORD_ONLY))
            continue
        kind = groups[parameter.name]
        of_fields = get_type_hints(kind, include_extras=True)
        parameters += [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=of_fields[f.name])
            for f in fields(kind)
        ]

    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.name in given})
        command(**given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    setattr(call, "__signature__", Signature(parameters))  # noqa: B010 (a type checker knows no such attribute)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
