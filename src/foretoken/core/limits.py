"""Checks of values that a user gives. They need no torch, so that the command line refuses a bad one at once.

Each raises ForetokenError for what it refuses.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from foretoken.core.errors import ForetokenError

LARGEST = 1e30  # the largest number that is added to scores, or multiplies them: float32 holds the result
NO_BIAS: Mapping[int, float] = {}
MAX_NODES = 4096  # the most nodes of a token tree besides the root
LEAST_SAMPLES = 200  # the fewest generations for the goodness-of-fit test of an audit
MOST_SAMPLES = 10**9  # the most
LEAST_MEASURED = 16  # the fewest tokens of a run whose speed is measured
MOST_DRAWS = 256  # the most draws at one node where rules are compared by the number of draws


def check_sampling(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] = NO_BIAS,
) -> None:
    """Refuse settings of core.sampling.Sampling from which no distribution follows.

    temperature: a finite number >= 0.
    top_k: a whole number >= 0.
    top_p: in (0, 1].
    min_p: in [0, 1].
    repetition_penalty: from 1 / LARGEST to LARGEST.
    frequency_penalty, presence_penalty: from -LARGEST to LARGEST.
    logit_bias: token id -> -inf, or a number from -LARGEST to LARGEST.
    """
    _require(0 <= number("temperature", temperature) < math.inf, "temperature", temperature, "a finite number >= 0")
    _require(whole("top_k", top_k) >= 0, "top_k", top_k, "0 (off) or a positive integer")
    _require(0 < number("top_p", top_p) <= 1, "top_p", top_p, "in (0, 1]")
    _require(0 <= number("min_p", min_p) <= 1, "min_p", min_p, "in [0, 1]")
    wanted = f"> 0, from {1 / LARGEST:g} to {LARGEST:g}"
    some = 1 / LARGEST <= number("repetition_penalty", repetition_penalty) <= LARGEST
    _require(some, "repetition_penalty", repetition_penalty, wanted)
    for name, value in (("frequency_penalty", frequency_penalty), ("presence_penalty", presence_penalty)):
        _require(abs(number(name, value)) <= LARGEST, name, value, f"finite, from {-LARGEST:g} to {LARGEST:g}")
    if not isinstance(logit_bias, Mapping):
        raise ForetokenError(f"logit_bias is a {type(logit_bias).__name__}: give a dict of token ids and numbers.")
    for token, bias in logit_bias.items():
        whole("A token of logit_bias", token)
        if not (-LARGEST <= number(f"logit_bias of token {token}", bias) <= LARGEST or bias == -math.inf):
            raise ForetokenError(
                f"logit_bias of token {token} is {bias}: it must be -inf, which rules the token out, or a number from "
                f"{-LARGEST:g} to {LARGEST:g}, below infinity."
            )


def check_counts(**counts: int | None) -> None:
    """Refuse whole numbers below 1; counts: name -> number, or None, which stands for a default."""
    for name, value in counts.items():
        if value is not None:
            count(name, value)


def count(name: str, value: Any) -> int:
    """Return a whole number `value` as an int; `name` stands for it in the error. Refuses one below 1, and None."""
    given = whole(name, value)
    _require(given >= 1, name, given, "at least 1")
    return given


def check_audited(temperature: float, samples: int) -> None:
    """Refuse a goodness-of-fit test that would test nothing.

    temperature: that of its texts, which must be above 0.
    samples: the number of generations, from LEAST_SAMPLES to MOST_SAMPLES.
    """
    if temperature <= 0:
        raise ForetokenError(f"temperature is {temperature}: the audit samples, so it must be above 0.")
    if samples < LEAST_SAMPLES:
        raise ForetokenError(f"samples is {samples}: the goodness-of-fit test needs at least {LEAST_SAMPLES}.")
    if samples > MOST_SAMPLES:
        raise ForetokenError(f"samples is {samples}: it must be at most {MOST_SAMPLES}.")


def check_choice(what: str, name: str | None, known: Iterable[str], optional: bool = True) -> None:
    """Refuse an unknown name.

    what: what is named, for the message.
    name: the name; None: nothing is named.
    known: the names that can be chosen.
    optional: whether nothing may be named.
    """
    if optional and name is None:
        return
    if not isinstance(name, str) or name not in known:
        raise ForetokenError(f"Unknown {what} {shown(name)}: choose one of {', '.join(known)}.")


def shown(name: object) -> str:
    """Return a name as it is, and what is none, or empty, as Python writes it."""
    return name if isinstance(name, str) and name else repr(name)


def few(names: list[str]) -> str:
    """Return up to three of the `names` as text, and how many others there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_seed(seed: int | None, prompts: int = 1) -> None:
    """Refuse seeds of more than the 32 bits that torch's CPU generator takes.

    seed: that of the first prompt, prompt i of a list has seed + i; None stands for a random one.
    prompts: the number of prompts.
    """
    if seed is not None and not 0 <= whole("seed", seed) <= 2**32 - max(prompts, 1):
        more = ", for each text: every text has the seed after that of the one before it" if prompts > 1 else ""
        raise ForetokenError(f"seed is {seed}: it must be in 0..2**32 - 1{more}.")


def check_measured(max_new_tokens: int) -> None:
    """Refuse runs that are too short to be measured; max_new_tokens: the number of tokens of a run."""
    if max_new_tokens < LEAST_MEASURED:
        raise ForetokenError(f"max_new_tokens is {max_new_tokens}: runs below {LEAST_MEASURED} tokens measure nothing.")


def check_stops(stops: Iterable[str]) -> None:
    """Refuse an empty one among the stop strings `stops`."""
    if "" in stops:
        raise ForetokenError("A stop string is empty: give one character or more, or leave stop out.")


def check_temperatures(temperatures: Iterable[float] | None) -> None:
    """Refuse `temperatures` of which one is no finite number >= 0; None stands for a default."""
    for temperature in temperatures or ():
        check_sampling(temperature=temperature)


def check_probability(draft_probability: float | None) -> None:
    """Refuse a `draft_probability` outside [0, 1]; None: there are no coins."""
    if draft_probability is not None and not 0 <= number("The draft probability", draft_probability) <= 1:
        raise ForetokenError(f"The draft probability is {draft_probability}: it must be in [0, 1].")


def whole(name: str, value: Any) -> int:
    """Return `value` as an int; `name` stands for it in the error.

    Raises ForetokenError for all but whole numbers, also for a float such as 1.0.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise ForetokenError(f"{name} is {value!r}: it must be a whole number.") from error


def number(name: str, value: Any) -> float:
    """Return `value` as a float, infinity where it is too large for one; `name` stands for it in the error.

    Raises ForetokenError for what is no real number.
    """
    if not isinstance(value, Real):
        raise ForetokenError(f"{name} is {value!r}: it must be a number.")
    given: Any = value
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise ForetokenError(f"{name} is {value}: it must be {want}.")
