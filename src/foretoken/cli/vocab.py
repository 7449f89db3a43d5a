"""`foretoken vocab`: can this drafter draft for this target, and how?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli import options
from foretoken.core.errors import ForetokenError


def vocab(
    target: Annotated[str, typer.Argument(help="Folder of the target, or of any model with its tokenizer.")],
    drafter: Annotated[str, typer.Argument(help="Folder of the drafter.")],
    text: Annotated[str | None, typer.Option(help="Text file like what will be generated, to measure on.")] = None,
    json_: options.Json = False,
) -> None:
    """Compare two vocabularies: sizes, intersection, overlap on a text, and the --vocab method that is advised."""
    from foretoken.models.load import load_tokenizer
    from foretoken.models.overlap import compare

    content = None
    if text is not None:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ForetokenError(f"Cannot read text file {text}: {why}.") from error
    overlap = compare(load_tokenizer(target), load_tokenizer(drafter), content)
    print(json.dumps(overlap.json()) if json_ else overlap.text())
