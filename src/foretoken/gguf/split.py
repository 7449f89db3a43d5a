"""The parts in which a GGUF model can be published, by the names that llama.cpp gives them."""

import re
from pathlib import Path

from foretoken.core.errors import ForetokenError
from foretoken.core.limits import few

PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def named_parts(path: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF model in their order, which need not be there.

    path: that of any part. A file whose name is not that of a part is a model by itself.
    """
    found = PART.fullmatch(path.name)
    names = [f"{found[1]}-{i:05}-of-{found[2]}.gguf" for i in range(1, int(found[2]) + 1)] if found else []
    return [path.with_name(name) for name in names] if path.name in names else [path]


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a GGUF model in their order.

    path: as for `named_parts`.

    Raises ForetokenError where parts are missing.
    """
    parts = named_parts(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        raise ForetokenError(
            f"Folder {path.parent} lacks {few(missing)}: all {len(parts)} parts of a model must stand in one "
            "folder, under their names."
        )
    return parts
