"""`foretoken vocab`: can this drafter draft for this target, and how?"""

import json
from typing import Annotated

import typer

from foretoken.cli import options
from foretoken.core.files import read_text
from foretoken.models.named import located


def vocab(
    target: Annotated[str, typer.Argument(help="Folder of the target, or of any model with its tokenizer.")],
    drafter: Annotated[str, typer.Argument(help="Folder of the drafter.")],
    text: Annotated[str | None, typer.Option(help="Text file like what will be generated, to measure on.")] = None,
    json_: options.Json = False,
) -> None:
    """Compare two vocabularies: sizes, intersection, overlap on a text, and the --vocab method that is advised."""
    located(target)
    located(drafter)
    content = None if text is None else read_text(text)
    from foretoken.models.load import load_tokenizer
    from foretoken.vocab.overlap import compare

    overlap = compare(load_tokenizer(target), load_tokenizer(drafter), content)
    print(json.dumps(overlap.json()) if json_ else overlap.text())
