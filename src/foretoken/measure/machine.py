"""A description of the machine on which a figure was measured, without which it cannot be compared."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from foretoken.models.identity import cpu_name, device_name, versions


def machine(device: torch.device) -> dict[str, Any]:
    """Return processor, threads, load, versions and commit, as plain values by name; device: where the models run."""
    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": device_name(device),
        "python": platform.python_version(),
        **versions(),
        "commit": commit(),
    }


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit(*folders: str) -> str | None:
    """Return the short commit of the checkout that this package runs from, with + if files differ from it.

    Returns None for an installed package, or where git cannot be run.

    folders: only files below these folders of the checkout are compared, new ones too; by default all files that git
        tracks.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    which = ["--", *folders] if folders else ["--untracked-files=no"]
    head = git("rev-parse", "--short", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", *which) else "")
