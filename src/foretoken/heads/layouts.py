"""Names of weights in published draft heads: other projects' names are translated to those of the head's authors."""

import re
from collections.abc import Iterable

EMBEDDING = "embed_tokens.weight"
# Weights that are not read: rotary frequencies, which follow from config.json, and copies of the target's norm and LM
# head, which only training needs.
DERIVED = r"(.*\.)?rotary_emb\.\w+$|verifier_(norm|lm_head)\.weight$"

# Keys that show a head of a kind that is not supported, and that kind, for messages.
OTHERS = {
    r"mask_hidden$": "a P-EAGLE head (all levels at once)",
    r"layers\.\d+\.(attention|mlp)_conv\.": "a DFlash 2 head (with convolutions)",
    r"(midlayer|layers\.\d+)\.self_attn\.[qk]_norm\.": "a layer with norms of queries and keys",
    r"token_map$": "a head with a list of the tokens that it scores",
}


def other_head(keys: Iterable[str], own: Iterable[str]) -> str | None:
    """Return what kind of head, of those that are not supported, some weights belong to; None for any other.

    keys: names of the weights, as the authors have them.
    own: the marks of the head that the weights are taken for; keys that match one are not looked at.
    """
    of_others = [key for key in keys if not any(re.match(mark, key) for mark in own)]
    return next((what for key in of_others for mark, what in OTHERS.items() if re.match(mark, key)), None)


def name_of(key: str) -> str:
    """Return the authors' name of a weight whose `key` may have the beginnings that other projects give it."""
    return re.sub(r"^(model\.|medusa_heads?\.)+", "", key)


def one_weight(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of `keys` that are the same weight by their authors' names."""
    first: dict[str, str] = {}
    both = [(first.setdefault(name_of(key), key), key) for key in keys if not re.match(DERIVED, key)]
    return [(one, other) for one, other in both if one != other]


def by_authors_names(keys: Iterable[str]) -> dict[str, str]:
    """Return a dict from the authors' name of each weight that a head needs to its key in a file.

    vLLM's heads have `model.` before all keys; its Medusa heads have `blocks.i.layers.j` and `lm_heads.i`, or one
    `lm_head` for all levels. In other Medusa heads `medusa_head.` stands before all keys. Sources: the loaders of vLLM,
    SGLang, SpecForge and speculators; the latter call the layer of EAGLE-3 `layers.0`.

    keys: all keys of the file.
    """
    plain = {name_of(key): key for key in keys if not re.match(DERIVED, key)}
    if any(key.startswith("layers.0.hidden_norm.") for key in plain):
        plain = {re.sub(r"^layers\.0\.", "midlayer.", key): was for key, was in plain.items()}
    blocks = {(int(m[1]), int(m[2])) for key in plain if (m := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", key))}
    if not blocks:
        return plain
    last = 1 + max(j for _, j in blocks)
    renamed = {re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", key): was for key, was in plain.items()}
    shared = renamed.pop("lm_head.weight", renamed.get("lm_heads.0.weight"))
    for i in sorted({i for i, _ in blocks}):
        own = renamed.pop(f"lm_heads.{i}.weight", shared)
        if own is not None:
            renamed[f"{i}.{last}.weight"] = own
    return renamed
