"""A probe of whether a model's forward follows the tree mask and the position ids; it runs before a model is used.

A model that ignores either would write plausible but wrong text, and must be found before it writes any.
The probe scores a small tree behind two tokens of text,

    a b   with the nodes   x(after b)   c(after b)   d(after c)

several times, always through the forward that will be used later and in the same shapes, and changes one thing at a
time. Which logits must change and which must not is then a test without any tolerance for rounding:

- d follows x instead of c: nothing differs but the mask, and the logits after d must change;
- x becomes another token: c and d do not see x, and their logits must not change. The weight of a hidden slot is
  exactly 0, so that not one bit changes. There are two exceptions. Where the other tokens of a forward take part in how
  a token is computed (choice of experts, quantised activations), a small share of what a visible token changes, `LEAK`,
  is allowed; and on a device whose sums have no fixed order, `NOISE` times what a repeated forward changes;
- c is placed one position further on: the logits after c must change.

Two more comparisons are between forwards of different shapes, which round differently. Their bound is a share of what
exchanging a visible token changes, not of the logits: activations of real models have outliers in the hundreds, and two
ways to the same bfloat16 logits can differ by several units there although both are right.

- the logits after d in the tree are those after d in the path c, d, up to `PATH` of that change (a smaller share in
  float32, unless weights are quantised, since input rows are then rounded to 8 bits), or up to `NOISE` times what
  reading the path token by token changes;
- in float32 the logits of the path are those of transformers' own forward, within the same bounds.
  A model that keeps recurrent states reads one token by other code than several and may ignore states in either, so
  that this change is no measure of its rounding there. In float32 it must itself be at most the share `BY_TOKEN`.
  In bfloat16 and float16 there is no such comparison: transformers' logits are not the exact ones either, and those
  of our kernel are the nearer to them (tests/test_models_kernel.py holds that, and finds wrong weights or layouts).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ForetokenError, is_shortage
from foretoken.core.shapes import Float
from foretoken.models.cache import Place

if TYPE_CHECKING:
    from foretoken.models.causal_lm import CausalLM
    from foretoken.models.rows import Rows

LENGTH = 4  # tokens of the text a b c d
# Settings of models in which other tokens of a forward take part in how a token is computed (ffn_config: DBRX's
# experts): LEAK is allowed there.
MIXING = (
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
    "n_routed_experts",
    "ffn_config",
    "quantization_config",
)
LEAK = 0.02  # share of a visible token's influence that an invisible one may have
PATH = {True: 0.01, False: 0.5}  # share of it by which tree and path may differ: in float32 (True), and else
# The same for reading token by token with recurrent states. It is larger since transformers' Nemotron-H and Zamba 2
# bound time steps from below only where they read several tokens.
BY_TOKEN = 0.1
NOISE = 4.0  # how many times the model's own rounding a difference may be


def probe_tokens(model: nn.Module) -> list[int]:
    """Return six ordinary tokens a, b, c, d, x, z of the vocabulary of `model`.

    They are spread over the first half of the vocabulary beyond its first tenth: special tokens, bytes and the unused
    rows of padded embeddings stand at either end.
    """
    own: Any = model  # transformers' or a skeleton
    embedding = own.get_input_embeddings()
    config = own.config.get_text_config(decoder=True)
    size = int(getattr(embedding, "num_embeddings", None) or config.vocab_size)
    return [(size // 10 + i * max(1, size // 15)) % size for i in range(6)]


@contextmanager
def first_forward(model: nn.Module, own: bool) -> Iterator[None]:
    """Turn an error of the first forwards of a model into a ForetokenError that names its class and says what to do.

    A shortage of memory stays what it is. own: whether the forwards are those of transformers' modules, as with compile
    off.
    """
    try:
        yield
    except Exception as error:  # models fail in as many ways as there are architectures
        if isinstance(error, ForetokenError) or is_shortage(error):
            raise
        said = next(iter(str(error).splitlines()), "").rstrip(".")
        off = "" if own else "load it with compile off, or "
        raise ForetokenError(
            f"{type(model).__name__} fails in its first forward ({type(error).__name__}: {said}): {off}choose a model "
            "of another architecture."
        ) from error


@torch.inference_mode()
def check_probe(lm: "CausalLM") -> None:
    """Raise ForetokenError, which names its class, for a model `lm` that does not follow tree mask and position ids."""
    kind, plain = type(lm.weights).__name__, lm._layout.probe
    a, b, c, d, x, z = probe_tokens(lm.weights)
    rows = lm.open(1, 8)
    rows.extend(rows.join(), [a, b])
    tree = _scores(rows, [x, c, d], [-1, -1, 1])
    if not bool(torch.isfinite(plain).all() and torch.isfinite(tree).all()):
        raise ForetokenError(f"Model {lm.name} gives NaN or infinite logits: check its weights and dtype.")
    seen = distance(_scores(rows, [x, c, d], [-1, -1, 0])[2], tree[2])
    hidden = _scores(rows, [z, c, d], [-1, -1, 1])
    leak = max(distance(hidden[node], tree[node]) for node in (1, 2))
    allowed = 0.0
    if leak > 0:
        mixing = any(getattr(lm.weights.config.get_text_config(decoder=True), name, None) for name in MIXING)
        repeated = distance(_scores(rows, [x, c, d], [-1, -1, 1])[2], tree[2])
        allowed = max(LEAK * seen if mixing else 0.0, NOISE * repeated)
    if not seen > 0 or leak > allowed:
        raise ForetokenError(
            f"{kind} scores a token tree otherwise than its paths: it does not follow the tree mask (what a node must "
            f"not see has {leak:.2g} of influence on its logits, what it must see {seen:.2g}), so it cannot be used."
        )
    # The order of the text is in recurrent states too, so that a model that keeps them may do without positions.
    if not lm.recurrent and torch.equal(_placed(rows, c, 2), _placed(rows, c, 3)):
        raise ForetokenError(
            f"{kind} scores a token tree otherwise than its paths: it does not follow the position ids, so it cannot "
            "be used."
        )
    _, path = _scores(rows, [c, d], [-1, 0])
    exact = lm.dtype == torch.float32 and not lm.quantised
    share = PATH[exact] * seen
    checks = [("its paths", distance(tree[2], path), share)]
    if lm.dtype == torch.float32:
        checks.append(("transformers' own forward", distance(path, plain), share))
    two_codes = exact and lm.recurrent
    if not two_codes and all(difference <= share for _, difference, _ in checks):
        return
    _scores(rows, [c], [-1], keep=[0])
    (by_token,) = _scores(rows, [d], [-1])
    rounding = NOISE * distance(by_token, path)
    if two_codes:
        checks.append(("token by token", distance(by_token, path), BY_TOKEN * seen))
        rounding = 0.0
    for what, difference, bound in checks:
        if not difference <= max(bound, rounding):
            raise ForetokenError(
                f"{kind} scores a token tree otherwise than {what} (by {difference:.2g}, where another token in the "
                f"text changes the scores by {seen:.2g}): it does not follow the tree mask, the position ids or its "
                "recurrent states as it should, so it cannot be used."
            )


def _scores(rows: "Rows", tokens: list[int], parents: list[int], keep: list[int] | None = None) -> Float[Tensor, "n v"]:
    """Return the logits of nodes after the text; then commit the path `keep` of them, by default none."""
    (logits,) = rows.score([tokens], [parents])
    rows.keep([keep or []])
    return logits.float().clone()


def _placed(rows: "Rows", token: int, position: int) -> Float[Tensor, " v"]:
    """Return the logits after one token behind the text that is given any position."""
    start = rows.lengths[0]
    rows.cache.place(Place(slice(0, 1), start, 1, start + 1))
    return rows._forward([[token]], [[position]], dict.fromkeys(rows._windows), head=True)[0, 0].float().clone()


def distance(one: Float[Tensor, " v"], other: Float[Tensor, " v"]) -> float:
    """Return the root mean square of the difference of two rows of logits, `one` and `other` [v], without its mean.

    A constant that is added to all logits changes no probability.
    """
    return float((one.float() - other.float()).double().std(correction=0))
