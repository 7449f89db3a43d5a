"""The profile file: what `foretoken tune` found for one pair of models on one machine, a small JSON object."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import write
from foretoken.core.limits import shown
from foretoken.recipe import VOCABS

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM

FORMAT = 4


@dataclass(frozen=True)
class Profile:
    """What `foretoken tune` found.

    target, drafter: fingerprints of the two models, as `check` takes them.
    host: the machine, see models/identity.py.
    tree, verifier: names of the best configuration; "plain" and empty where nothing beat plain decoding.
    vocab: that of the best configuration; None where the drafter has the target's vocabulary.
    draft_probability: that of the best configuration; None where it has no coins.
    extra: what a drafted step takes beyond a plain one, in plain steps: per step, per level, per node.
    acceptance: the acceptance of the draft token of chain:1 on the prompts of the measurement, in [0, 1].
    versions, settings: with which versions of packages, and how, it was measured.
    configurations: all that was compared, one row per configuration.
    format: the version of the file's format.
    """

    target: str
    drafter: str
    host: dict[str, str]
    tree: str
    verifier: str
    vocab: str | None
    draft_probability: float | None
    extra: tuple[float, float, float]
    acceptance: float
    versions: dict[str, str]
    settings: dict[str, Any]
    configurations: list[dict[str, Any]]
    format: int = FORMAT

    def check(self, path: str, target: "CausalLM", drafter: str) -> None:
        """Refuse another machine, and models that the profile was not made for.

        path: the profile's file, for the error.
        target: the target that is to be used.
        drafter: `Engine.fingerprint` of the engine.
        """
        from foretoken.models.identity import fingerprint, host  # takes seconds

        here = host(target)
        if set(self.host) != set(here):
            raise _of_another_version(path)
        for what, was in self.host.items():
            if (now := here[what]) != was:
                differs = f"{what} {was}, and here it is {now}:"
                if what == "threads":
                    differs = f"{was} threads, not {now}: set OMP_NUM_THREADS={was}, or"
                raise ForetokenError(f"Profile {path} was made with {differs} run foretoken tune here.")
        for which, was, now in (("target", self.target, fingerprint(target)), ("drafter", self.drafter, drafter)):
            if was != now:
                raise made_for_another(path, which)

    def write(self, path: str) -> None:
        """Write the profile to a file at `path`; raises ForetokenError, and leaves no part of it, where that fails."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        write(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_profile(path: str) -> Profile:
    """Read the profile in the file at `path`; raises ForetokenError for a file that is none, or a damaged one."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ForetokenError(f"Cannot read profile {shown(path)}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ForetokenError(f"{path} is not a profile: foretoken tune writes one.") from error
    if not isinstance(record, dict) or "format" not in record:
        raise ForetokenError(f"{path} is not a profile: foretoken tune writes one.")
    if record["format"] != FORMAT or set(record) != {field.name for field in fields(Profile)}:
        raise _of_another_version(path)
    for name, good in GOOD.items():
        if not good(record[name]):
            raise ForetokenError(f"Profile {path} is damaged, its {name} cannot be: run foretoken tune again.")
    return Profile(**{**record, "extra": tuple(record["extra"])})


def made_for_another(path: str, which: str) -> ForetokenError:
    """Return the error for the profile in the file `path` and another target or drafter, which `which` says."""
    return ForetokenError(f"Profile {path} was made for another {which}: run foretoken tune for this pair.")


def _of_another_version(path: str) -> ForetokenError:
    return ForetokenError(f"Profile {path} is of another version of foretoken: run foretoken tune again.")


def _all(kind: type, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


GOOD: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("target", "drafter", "tree", "verifier"), lambda value: isinstance(value, str)),
    "vocab": lambda value: value is None or value in VOCABS,
    "draft_probability": lambda value: value is None or (_number(value) and 0 <= value <= 1),
    **dict.fromkeys(("host", "versions"), lambda value: isinstance(value, dict) and _all(str, value.values())),
    "extra": lambda value: isinstance(value, list) and len(value) == 3 and all(map(_number, value)),
    "acceptance": lambda value: _number(value) and 0 <= value <= 1,
    "settings": lambda value: isinstance(value, dict),
    "configurations": lambda value: isinstance(value, list) and _all(dict, value),
}
