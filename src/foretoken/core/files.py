"""Files that appear whole or not at all."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from foretoken.core.errors import ForetokenError


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Written under a temporary name, then moved; nothing is left behind where that fails."""
    temporary = Path(f"{path}.tmp")
    try:
        how(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        raise ForetokenError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
