"""The kinds of draft heads by name.

A new head takes three places: a class below `heads.head.PublishedHead` with its module, its published layout and the
rows that draft with it; its name here; its loss and learning rate in train/losses.py.
"""

from typing import Any

from foretoken.core.lazy import Lazy

# A checkpoint is of the first kind whose marks are all among its keys. EAGLE's one mark is among the keys of the four
# kinds before it too, hence the order.
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
