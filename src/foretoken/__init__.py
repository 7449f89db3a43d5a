"""Foretoken: faster generation from any causal language model, with exactly the same output distribution."""

from foretoken.build import law, load
from foretoken.build import tree_policy as tree
from foretoken.build import verifier_named as verifier
from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Sampling
from foretoken.core.tree import Siblings, TokenTree
from foretoken.engine import Chunk, Engine, Result
from foretoken.hf import custom_generate
from foretoken.stats import Stats
from foretoken.version import __version__

__all__ = [
    "Chunk",
    "Engine",
    "ForetokenError",
    "Result",
    "Sampling",
    "Siblings",
    "Stats",
    "TokenTree",
    "__version__",
    "custom_generate",
    "law",
    "load",
    "tree",
    "verifier",
]
