"""Engines of the demo models for tests that load them many times: the models are loaded once for each dtype."""

from functools import cache
from typing import Any

import foretoken
from foretoken.build import plain, with_recipe
from foretoken.cli.options import demo_folder
from foretoken.engine import Result
from foretoken.recipe import Recipe


@cache
def _loaded(dtype: str | None, drafter: str) -> foretoken.Engine:
    return foretoken.load(str(demo_folder() / "target"), drafter=drafter, device="cpu", dtype=dtype)


def demo_engine(dtype: str | None = "float32", drafter: str = "none", **recipe: Any) -> foretoken.Engine:
    """The demo target and a drafter, whose weights other tests share: do not change them.

    dtype: of both models; None for that of their checkpoints.
    drafter: a folder, "ngram" or "none".
    recipe: of a `Recipe`; without a tree, the default one.
    """
    engine = _loaded(dtype, drafter)
    return with_recipe(engine, Recipe(**{"tree": engine.tree, **recipe})) if recipe else engine


def ids_of(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


def check_greedy(engine: foretoken.Engine, prompts: list, most: int = 60, times: int = 1) -> list[Result]:
    """Assert that greedy texts are plain decoding's, so many times; the results of the last time."""
    settings, results = {"max_new_tokens": most, "temperature": 0.0}, list[Result]()
    wanted = ids_of(plain(engine).generate(prompts, **settings))
    for _ in range(times):
        results = engine.generate(prompts, **settings)
        assert ids_of(results) == wanted
    return results


def check_batch(engine: foretoken.Engine, prompts: list, most: int, temperature: float = 0.7) -> list[Result]:
    """Assert that each text depends on its own seed alone, whatever is beside it; the results of the batch."""
    settings = {"max_new_tokens": most, "temperature": temperature}
    together = engine.generate(prompts, seed=5, **settings)
    assert [result.seed for result in together] == [5 + i for i in range(len(prompts))]
    assert ids_of(together) == ids_of([engine.generate(p, seed=5 + i, **settings) for i, p in enumerate(prompts)])
    return together
