"""What all pages with token trees share: their style, their legend, the script that draws trees, and labels."""

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from foretoken.models.text import REPLACEMENT, Tokenizer

Label = Callable[[int], str]  # the text that stands for a token id
PARTS = {"__STYLE__": "tinted.css", "__LEGEND__": "legend.html", "__TREES__": "tree.js"}  # of every page with trees


def composed(template: str) -> str:
    """Return a page with the parts that all pages share; template: its HTML, with their places marked as in PARTS."""
    for place, name in PARTS.items():
        template = template.replace(f"{place}\n", (files("foretoken.trace") / name).read_text(encoding="utf-8"), 1)
    return template


def labels_of(tokenizer: Tokenizer | None) -> Label:
    """Return the function that gives the text of one token id, as a node shows it.

    tokenizer: the target's; None where there is none, and ids are shown as numbers.
    """

    if tokenizer is None:
        return str
    known = set(tokenizer.get_vocab().values())
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}

    def written(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cache
    def label(token: int) -> str:
        if token not in known:  # a padded head has ids without a token, and so has a vocabulary with gaps
            return str(token)
        text = written([token])
        if token in special or REPLACEMENT in text:
            return text
        return written([token, token])[len(text) :]  # at the beginning of a text decoders may leave out a space

    return label
