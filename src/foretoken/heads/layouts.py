"""The names that published weights of draft heads go by, and the one of the head's authors for each."""

import re
from collections.abc import Iterable

EMBEDDING = "embed_tokens.weight"
# Frequencies that follow from config.json, and copies of the target's norm and LM head that training compared with.
DERIVED = r"(.*\.)?rotary_emb\.\w+$|verifier_(norm|lm_head)\.weight$"

# Keys of heads that are not read, and what they belong to.
OTHERS = {
    r"mask_hidden$": "a P-EAGLE head (all levels at once)",
    r"layers\.\d+\.(attention|mlp)_conv\.": "a DFlash 2 head (with convolutions)",
    r"(midlayer|layers\.\d+)\.self_attn\.[qk]_norm\.": "a layer with norms of queries and keys",
    r"token_map$": "a head with a list of the tokens that it scores",
}


def other_head(keys: Iterable[str], own: Iterable[str]) -> str | None:
    """What makes weights a head that is not read, None where nothing does.

    keys: by the authors' names. own: the marks of the head that they are taken for; its keys are no other's.
    """
    of_others = [key for key in keys if not any(re.match(mark, key) for mark in own)]
    return next((what for key in of_others for mark, what in OTHERS.items() if re.match(mark, key)), None)


def by_authors_names(keys: Iterable[str]) -> dict[str, str]:
    """Of each weight that a head needs, the key that it has in a file, by the key that the head's authors give it.

    vLLM writes `model.` before all keys of a head, and Medusa as `blocks.i.layers.j` and `lm_heads.i`, or one `lm_head`
    of all levels; the others before it `medusa_head.`. Sources: the loaders of vLLM, SGLang, SpecForge and speculators.
    """
    plain = {re.sub(r"^(model\.|medusa_heads?\.)+", "", key): key for key in keys if not re.match(DERIVED, key)}
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
