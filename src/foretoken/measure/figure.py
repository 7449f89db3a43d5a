"""Files of plots: refused before minutes of measuring, written at the end."""

from pathlib import Path
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.core.files import check_file, write


def check_plot(path: str) -> None:
    """Before minutes of measuring: is matplotlib there, does it know the file's format, and can it be written?"""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ForetokenError("Plots need matplotlib: pip install 'foretoken[bench]'.") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if _kind(path) not in known:
        raise ForetokenError(f"Cannot plot to {path}: end its name in one of {', '.join(sorted(known))}.")
    check_file(Path(path))


def save(figure: Any, path: str) -> None:
    """Write a matplotlib figure."""
    write(Path(path), lambda temporary: figure.savefig(temporary, dpi=150, format=_kind(path)))


def _kind(path: str) -> str:
    return path.rpartition(".")[2]
