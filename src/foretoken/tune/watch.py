"""Short runs of what no simple model predicts: trees whose shape follows q, drafts that are strings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretoken.measure.continuations import Runs
from foretoken.recipe import PLAINLY, Recipe

FALLS = 0.95  # of a family's best tokens/s: below it larger members are not run


@dataclass(frozen=True)
class Watched:
    """tokens, seconds: of a step."""

    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def watched(
    families: Sequence[Sequence[Recipe]],
    run: Callable[[Sequence[Recipe]], Mapping[Recipe, Runs]],
    plain_s: float,
) -> dict[Recipe, Watched]:
    """Members of equal place in all families side by side, with plain decoding, which puts their times on the scale of
    its plain_s seconds a step; from place to place as long as a family gets faster, or nearly."""
    found: dict[Recipe, Watched] = {}
    best: dict[int, float] = {}
    alive = list(range(len(families)))
    place = 0
    while alive := [i for i in alive if place < len(families[i])]:
        members = {i: families[i][place] for i in alive}
        runs = run([PLAINLY, *members.values()])
        scale = plain_s / runs[PLAINLY].seconds_per_step
        for i, c in members.items():
            found[c] = Watched(runs[c].tokens_per_step, scale * runs[c].seconds_per_step)
            best[i] = max(best.get(i, 0.0), found[c].tokens_per_s)
        alive = [i for i, c in members.items() if found[c].tokens_per_s >= FALLS * best[i]]
        place += 1
    return found
