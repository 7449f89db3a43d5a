"""What all pages with token trees share: their style, their legend, the script that draws trees, and labels."""

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from foretoken.models.text import Tokenizer

Label = Callable[[int], str]  # the text that stands for a token id
PARTS = {"__STYLE__": "tinted.css", "__LEGEND__": "legend.html", "__TREES__": "tree.js"}  # of every page with trees
SPACE_SIGN = "\u2581"  # stands for a space in some tokenizers, which do not decode it at the beginning of a text


def composed(template: str) -> str:
    """Return a page with the parts that all pages share; template: its HTML, with their places marked as in PARTS."""
    for place, name in PARTS.items():
        template = template.replace(f"{place}\n", (files("foretoken.trace") / name).read_text(encoding="utf-8"), 1)
    return template


def labels_of(tokenizer: Tokenizer | None) -> Label:
    """Return the function that gives the text of one token id, as a node shows it.

    tokenizer: the target's; None where there is none, and ids are shown as numbers.
    """

    @cache
    def label(token: int) -> str:
        if tokenizer is None or token >= len(tokenizer):  # a padded head has ids without a token
            return str(token)
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        piece = str(tokenizer.convert_ids_to_tokens(token))
        return f" {text}" if piece.startswith(SPACE_SIGN) and not text.startswith(" ") else text

    return label
