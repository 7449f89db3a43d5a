"""The folder that a training run writes: a new one, an empty one, or one of its own."""

import json
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder

CHECKPOINT, PROVENANCE, LOG = "checkpoint.pt", "provenance.json", "log.jsonl"


def check_out(folder: Path) -> None:
    """Refuse a folder that holds something else than a run of ours, such as a model, which would be overwritten."""
    check_folder(folder)
    if not folder.exists():
        return
    found = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
    held = found - {LOG}  # which is all there is of a run that was stopped early
    if held and not held & {CHECKPOINT, PROVENANCE}:
        raise ForetokenError(
            f"Folder {folder} holds {min(held)} and no training run, so that --out would overwrite it: name a new or "
            "empty folder."
        )


def check_own(folder: Path, plan: dict[str, Any]) -> None:
    """Refuse a folder whose head was trained under another plan; a checkpoint is checked where it is read."""
    path = folder / PROVENANCE
    check_out(folder)
    if not path.exists() or (folder / CHECKPOINT).exists():
        return
    try:
        known = json.loads(path.read_text())["plan"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        known = None
    if known != plan:
        raise ForetokenError(
            f"Folder {folder} holds a head of another training run, which --out would overwrite: name a new folder."
        )
