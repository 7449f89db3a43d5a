"""Foretoken: faster generation from decoder-only language models, with exactly the same output distribution."""

import os
from typing import TYPE_CHECKING, Any

from foretoken.core.lazy import imported
from foretoken.version import __version__

if not os.path.isdir(__path__[0]):
    raise ImportError("Foretoken must be installed as files, as by pip install: it does not run from a zip archive.")

if TYPE_CHECKING:
    from foretoken.build import load
    from foretoken.catalogue.fetch import fetch
    from foretoken.catalogue.known import known_model
    from foretoken.core.errors import ForetokenError
    from foretoken.core.sampling import Sampling
    from foretoken.core.tree import Siblings, TokenTree
    from foretoken.engine import Chunk, Engine, Result
    from foretoken.hf import custom_generate
    from foretoken.models.grammar import Grammar
    from foretoken.names import law, verifier
    from foretoken.names import tree_policy as tree
    from foretoken.stats import Stats
    from foretoken.trace import Trace
    from foretoken.verify.acceptance import acceptance, alpha_star

# Names are imported when first used: torch takes seconds, and `foretoken --help` must not wait for it.
_HOMES = {
    "Chunk": "engine:Chunk",
    "Engine": "engine:Engine",
    "ForetokenError": "core.errors:ForetokenError",
    "Grammar": "models.grammar:Grammar",
    "Result": "engine:Result",
    "Sampling": "core.sampling:Sampling",
    "Siblings": "core.tree:Siblings",
    "Stats": "stats:Stats",
    "TokenTree": "core.tree:TokenTree",
    "Trace": "trace:Trace",
    "acceptance": "verify.acceptance:acceptance",
    "alpha_star": "verify.acceptance:alpha_star",
    "custom_generate": "hf:custom_generate",
    "fetch": "catalogue.fetch:fetch",
    "known_model": "catalogue.known:known_model",
    "law": "names:law",
    "load": "build:load",
    "tree": "names:tree_policy",
    "verifier": "names:verifier",
}

__all__ = [
    "Chunk",
    "Engine",
    "ForetokenError",
    "Grammar",
    "Result",
    "Sampling",
    "Siblings",
    "Stats",
    "TokenTree",
    "Trace",
    "__version__",
    "acceptance",
    "alpha_star",
    "custom_generate",
    "fetch",
    "known_model",
    "law",
    "load",
    "tree",
    "verifier",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    return imported(_HOMES[name])
