"""`foretoken vocab`: can this drafter draft for this target, and how?"""

import json

from foretoken.cli.command import command
from foretoken.core.errors import ForetokenError
from foretoken.core.files import read_text
from foretoken.models.named import NO_MODELS, located


@command
def vocab(target: str, drafter: str, /, *, text: str | None = None, json_: bool = False) -> None:
    """Compare two vocabularies: sizes, intersection, overlap on a text, and the --vocab method that is advised.

    target: Folder of the target, or of any model with its tokenizer.
    drafter: Folder of the drafter.
    text: Text file like what will be generated, to measure on.
    """
    if drafter in NO_MODELS:
        raise ForetokenError(
            f"Drafter {drafter} has no tokenizer of its own to compare: name a model's folder or file."
        )
    located(target)
    located(drafter)
    content = None if text is None else read_text(text)
    from foretoken.models.load import load_tokenizer
    from foretoken.vocab.overlap import compare

    overlap = compare(load_tokenizer(target), load_tokenizer(drafter), content)
    print(json.dumps(overlap.json()) if json_ else overlap.text())
