"""Many engines on a Ray cluster: files of prompts (batch.py), and the server in replicas (app.py, router.py)."""

from importlib import import_module
from typing import Any

from foretoken.core.errors import ForetokenError


def need(name: str) -> Any:
    """Return the module `name` of Ray.

    Raises ForetokenError where Ray, or a package that this part of it needs, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ForetokenError("Ray is not installed: pip install -e '.[cluster]'.") from error
