"""`foretoken generate --compare`: one engine beside plain decoding."""

import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from foretoken.measure.harness import WARM_TOKENS, interleave

if TYPE_CHECKING:
    from foretoken.engine import Engine, Prompt
    from foretoken.stats import Stats

COMPARED, COMPARING_S = 3, 5.0  # runs of each engine, and seconds after which no more are begun


def warm(engine: "Engine", prompt: "Prompt", arguments: dict[str, Any]) -> None:
    """Run once all that the measured runs will run, so that nothing is compiled during them.

    No token ends these texts, and with method auto the drafts are also run at full depth: a text that ends early, or
    a controller that decodes plainly at first, would leave loops uncompiled.

    engine, prompt, arguments: as in `compared`.
    """
    from foretoken.build import plain
    from foretoken.draft.auto import AutoDrafter
    from foretoken.draft.hybrid import model_of

    engine = replace(engine, eos_ids=frozenset())
    arguments = {**arguments, "stop": (), "max_new_tokens": min(WARM_TOKENS, arguments["max_new_tokens"])}
    model = model_of(engine.drafter)
    if isinstance(model, AutoDrafter):
        replace(engine, drafter=model.inner).generate(prompt, **arguments)
    for each in (engine, plain(engine)):
        each.generate(prompt, **arguments)


def compared(engine: "Engine", prompt: "Prompt", arguments: dict[str, Any]) -> dict[str, float | None]:
    """Return medians over runs of this engine and of plain decoding, which take turns and print nothing.

    Printing would take time, and one run of each says little on a machine that does other things too.

    engine, prompt, arguments: the engine with its drafter, and the arguments of `Engine.generate` in all runs.
    Returns tokens per second of both, and the engine's speed divided by plain decoding's: over the whole run (speedup),
    and after the first step, which reads the prompt (decoding_speedup; None for a text of one step).
    """
    from foretoken.build import plain

    begun = time.perf_counter()
    runs: dict[str, list[Stats]] = {"ours": [], "plain": []}
    engines = {"plain": plain(engine), "ours": engine}
    for turn in interleave(
        engines, range(COMPARED), lambda each, _: each.generate(prompt, **arguments).stats, None, lambda _: None
    ):
        runs[turn.name].append(turn.result)
        if turn.last and time.perf_counter() - begun > COMPARING_S:
            break
    ours, base = (median(stats.tokens_per_s for stats in runs[name]) for name in ("ours", "plain"))
    later, later_base = (median(stats.decoding_tokens_per_s for stats in runs[name]) for name in ("ours", "plain"))
    return {
        "tokens_per_s": ours,
        "plain_tokens_per_s": base,
        "speedup": ours / base,
        "decoding_speedup": later / later_base if later and later_base else None,
    }
