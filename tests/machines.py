"""Machines of known costs, on which a controller decides how far drafters of known acceptance draft."""

import math

import numpy as np

from foretoken.draft.controller import Controller, Costs, Experience, expected_extra

# Plain steps that a step of each depth takes on each machine; noise is added.

DEEPEST = 12


def line(once: float, level: float) -> list[float]:
    return [1.0] + [1.0 + once + depth * level for depth in range(1, DEEPEST + 1)]


MACHINES = {
    "slow drafter": line(0.2, 0.35),
    "quick drafter": line(0.1, 0.09),
    "costly drafter": line(0.1, 0.95),
    # Forwards in blocks of six nodes, as the demo pair's (root and five drafts, root and eleven), and of eight.
    "blocks of 6": [1.0, 1.35, 1.6, 1.9, 2.1, 2.4, 2.95, 3.1, 3.25, 3.4, 3.55, 3.75, 4.5],
    "blocks of 8": [1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 2.9, 3.0, 3.1, 3.2, 3.3],
}
EXTRA = expected_extra(range(DEEPEST + 1))


def controller(experience: Experience | None = None) -> Controller:
    """A controller of one sequence; by default of a drafter that paid so far, on a machine whose plain step takes 1."""
    found = Controller(experience or Experience(EXTRA, costs={1: Costs(EXTRA, 1.0)}))
    found.join()
    return found


def depth_of(chosen: list[tuple[float, ...]]) -> int:
    """How deep the next step drafts."""
    return max(map(len, chosen), default=0)


def simulate(
    acceptance, machine: list[float], num_tokens: int, experience: Experience, rng, slower: float = 1.0, stretch=100
) -> tuple[float, list[tuple[int, int]]]:
    """(plain steps that a text took, (position, depth) of every step); acceptance(position) is that of one draft.

    slower: in every second `stretch` of steps the clock shows this times as much, which is not counted.
    """
    deciding = controller(experience)
    position, total, plain_run, path = 0, 0.0, 0, []
    while position < num_tokens:
        depth = depth_of(deciding.choose(timed=position > 0)) if num_tokens - position > 1 else 0
        limit = min(depth, num_tokens - position - 1)
        accepted = 0
        while accepted < limit and rng.random() < acceptance(position + accepted):
            accepted += 1
        catch_up = (machine[2] - machine[1]) * 0.05 * plain_run if depth and plain_run > 1 else 0.0
        seconds = (machine[limit] + catch_up) * math.exp(0.1 * rng.standard_normal())
        if rng.random() < 0.02:
            seconds *= 3  # another program had the core
        total += seconds
        if len(path) // stretch % 2:
            seconds *= slower
        if depth:
            deciding.learn_acceptance([limit], [accepted], [None])
        if position:
            deciding.learn_cost(limit, accepted + 1.0, seconds, plain_run if limit and plain_run > 1 else 0)
        path.append((position, depth))
        plain_run = 0 if depth else plain_run + 1
        position += accepted + 1
    deciding.leave(0)
    return total, path


NOISE = math.exp(0.1**2 / 2) * 1.04  # what a plain step takes with it


def speed(acceptance: float, machine: list[float], num_tokens: int, num_texts: int, slower=1.0, stretch=100) -> float:
    """Tokens per plain step, over texts that share their experience; three times, since one start may be unlucky."""
    total = 0.0
    for seed in range(3):
        rng, known = np.random.default_rng(seed), Experience(EXTRA)
        for _ in range(num_texts):
            total += simulate(lambda _: acceptance, machine, num_tokens, known, rng, slower, stretch)[0]
    return NOISE * 3 * num_texts * num_tokens / total


def rates(acceptance: float, machine: list[float]) -> list[float]:
    """Tokens per plain step of every fixed depth."""
    return [sum(acceptance**i for i in range(d + 1)) / cost for d, cost in enumerate(machine)]
