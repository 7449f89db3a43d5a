"""The kinds of draft heads by name."""

from collections.abc import Callable
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.lazy import Lazy

# (parts of the target, layers, levels) -> a new head
HEADS: Lazy[Callable[..., Any]] = Lazy(
    {
        "gumiho": "heads.make:gumiho",
        "eagle": "heads.make:eagle",
        "eagle3": "heads.make:eagle3",
        "medusa": "heads.make:medusa",
        "hydra": "heads.make:hydra",
    }
)


def check_head(kind: str) -> None:
    if kind not in HEADS:
        raise ForetokenError(f"Unknown head {kind}: choose one of {', '.join(HEADS)}.")
