"""Checks of the folder that a training run writes to: it must be new, empty, or from the same run."""

import json
from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_folder

CHECKPOINT, PROVENANCE, LOG = "checkpoint.pt", "provenance.json", "log.jsonl"


def check_out(folder: Path) -> None:
    """Raise ForetokenError if `folder` holds files but no training run: a model there, say, would be overwritten."""
    check_folder(folder)
    if not folder.exists():
        return
    found = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
    held = found - {LOG}  # the log alone is what a run leaves that was stopped before its first checkpoint
    if held and not held & {CHECKPOINT, PROVENANCE}:
        raise ForetokenError(
            f"Folder {folder} holds {min(held)} and no training run, so that --out would overwrite it: name a new or "
            "empty folder."
        )


def check_own(folder: Path, plan: dict[str, Any]) -> None:
    """Raise ForetokenError if a run must not write to a folder, as when its head was trained under another plan.

    A folder with a checkpoint passes here: `Trainer.resume` compares its plan.

    folder: the folder, which need not exist.
    plan: the entries of the run's `Plan`.
    """
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
