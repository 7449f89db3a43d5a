"""The kinds of draft heads by name.

A new head takes three places: a class below `heads.head.PublishedHead` with its module, its published layout and the
rows that draft with it; its name here; its loss and learning rate in train/losses.py.
"""

from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.lazy import Lazy

# In the order in which a checkpoint's keys are held against their layouts: EAGLE's are among those of the four before.
HEADS: Lazy[Any] = Lazy(
    {
        "dflash": "heads.dflash:DFlash",
        "jetflow": "heads.dflash:JetFlow",
        "eagle3": "heads.eagle3:Eagle3",
        "gumiho": "heads.eagle:Gumiho",
        "eagle": "heads.eagle:Eagle",
        "medusa": "heads.flat:Medusa",
        "hydra": "heads.flat:Hydra",
    }
)


def check_head(kind: str) -> None:
    """Raises ForetokenError where no head is called `kind`."""
    if kind not in HEADS:
        raise ForetokenError(f"Unknown head {kind}: choose one of {', '.join(HEADS)}.")
