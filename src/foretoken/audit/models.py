"""Losslessness on the given models: tree scores, greedy text, and the law of sampled tokens.

Every reference comes from plain forwards of the model itself, without a cache and without foretoken's masks. For
quantised weights it comes from plain decoding, see `last_logits`.
"""

import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from foretoken.audit import fit
from foretoken.audit.bits import KERNEL
from foretoken.audit.report import FAILED, NONE, OK, WEAK, Check, Section, largest, verdict
from foretoken.audit.wrong import LikeliestDraft
from foretoken.core.interfaces import Drafter
from foretoken.core.laws import IID
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence as Running
from foretoken.core.shapes import Float
from foretoken.core.tree import path_to
from foretoken.core.verifier import Verifier
from foretoken.decode import Decoder, DraftFailedWarning, NoDrafter
from foretoken.draft.hybrid import model_of
from foretoken.draft.lm import LMDrafter
from foretoken.draft.product import ProductDrafter
from foretoken.engine import Engine
from foretoken.models.probe import PATH, distance
from foretoken.models.target import LMTarget, LMTargetSession
from foretoken.models.text import encode
from foretoken.trees import static

PROMPTS = (
    "The cat sat on",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
    "import numpy as np\n\nx = np.",
)
MOST_PROMPT = 12  # the most ids of a prompt: each of thousands of generations reads it anew
GREEDY_TOKENS = 32  # new tokens of each text at temperature 0
NUM_TOKENS = 3  # tokens whose joint law is tested
BATCH = 32  # generations that are sampled together
ALONE = 8  # one sample of so many is decoded at batch size 1, for which there is other code
TELL_S = 10.0  # seconds between two lines of progress while generations are sampled
UNTESTED = "; no draft token was accepted, or too few, so that drafting was not tested here"
LEAST_ACCEPTED = 0.1  # draft tokens per sampled text, below which a wrong law could not be seen
LEAST_POWER = 0.5  # a passed test counts if it would have seen a wrong temperature with this probability
FALSE_ALARM = 1e-4  # the probability of a false alarm of all sampling tests together
# How far logits may differ by rounding when they are computed in another order, relative to the largest logit.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def prompts(engine: Engine, seed: int) -> list[list[int]]:
    """Return short prompts as ids of the target; they are random where there is no tokenizer.

    engine: the models.
    seed: of random ids.
    """
    rng = random.Random(seed)
    v = engine.target.vocab_size
    if engine.tokenizer is None:
        return [[rng.randrange(v) for _ in range(4 + 2 * i)] for i in range(len(PROMPTS))]
    texts = [encode(engine.tokenizer, text)[:MOST_PROMPT] for text in PROMPTS]
    return [[x for x in ids if x < v] or [rng.randrange(v)] for ids in texts]


@torch.inference_mode()
def last_logits(target: LMTarget, ids: Sequence[Sequence[int]]) -> Float[Tensor, "b v"]:
    """Return logits after the last position of b texts, by plain forwards of the model, float32 or float64 [b, v].

    They are transformers' own forwards, but for quantised weights: products with these round the activations to 8 bits.
    Two orders of the same sums then differ by whole steps of that rounding, so that transformers' own forward is no
    reference for such models; theirs is plain decoding in the backend that is audited.

    target: the model.
    ids: the ids of each text, all of one length.
    """
    lm = target.lm
    if not lm.quantised:
        texts = torch.tensor([list(row) for row in ids], device=lm.device)
        logits = lm.model(input_ids=texts, use_cache=False)[0][:, -1]
        return logits if logits.dtype == torch.float64 else logits.float()
    rows = lm.open(len(ids), len(ids[0]))
    for row in ids:
        rows.extend(rows.join(), row[:-1])
    return torch.cat(rows.score([row[-1:] for row in ids], [[-1]] * len(ids))).float()


def _rounding(target: LMTarget) -> torch.dtype:
    """Return the dtype by whose rounding the logits of a model may differ.

    It is the model's own, but bfloat16 for quantised weights outside our kernel: there torch computes what is between
    the products, its sums have another order in a tree, and so the 8 bits of activations are rounded otherwise.
    """
    eight_bits = target.lm.quantised and target.lm.execution != KERNEL
    return torch.bfloat16 if eight_bits else target.lm.dtype


def _tolerance(target: LMTarget, logits: Tensor) -> float:
    """Return the largest difference by rounding alone of two logits of a model; logits: how large they are [.., v]."""
    return ROUNDING[_rounding(target)] * max(1.0, float(logits[logits.isfinite()].abs().max()))


def off(target: LMTarget, got: Sequence[Float[Tensor, " v"]], paths: Sequence[Sequence[int]]) -> float:
    """Return how far the logits of nodes are from those of plain forwards over their paths; 1 is what is allowed.

    What is allowed is rounding. In 16 bits the activations of real models have outliers and are rounded by more. There
    it may also be a share of the change that another token before the node makes on average, as in models/probe.py: if
    a node saw a token that it must not see, its logits would change by about as much.

    target: the model.
    got: the logits of each node [v].
    paths: per node the ids of its text and its path, the node's own id last; at least two ids.
    """
    wants = [last_logits(target, [path])[0] for path in paths]
    pairs = list(zip(got, wants, strict=True))
    worst = largest(
        float((logits.to(want.dtype) - want).abs().max()) / _tolerance(target, want) for logits, want in pairs
    )
    if worst <= 1 or torch.finfo(_rounding(target)).bits > 16:
        return worst
    v = target.vocab_size
    exchanged = [[*path[:-2], (path[-2] + v // 2) % v, path[-1]] for path in paths]
    changes = [distance(last_logits(target, [path])[0], want) for path, want in zip(exchanged, wants, strict=True)]
    allowed = max(PATH[False] * mean(changes), sys.float_info.min)
    return min(worst, largest(distance(logits, want) for logits, want in pairs) / allowed)


def tree_scores(engine: Engine, seed: int) -> Section:
    """Compare the scores of random trees, from one forward for a batch of texts, with those of one forward per path.

    engine: the models.
    seed: of the trees.
    """
    rng = random.Random(seed)
    target = engine.target
    texts = prompts(engine, seed)
    rows = target.lm.open(len(texts), max(map(len, texts)) + 40)
    for ids in texts:
        rows.extend(rows.join(), ids)
    got: list[Tensor] = []
    paths: list[list[int]] = []
    for _ in range(2):
        sizes = [rng.randint(4, 10) for _ in texts]
        tokens = [[rng.randrange(target.vocab_size) for _ in range(n)] for n in sizes]
        parents = [[rng.choice([i - 1, rng.randrange(-1, i)]) if i else -1 for i in range(n)] for n in sizes]
        scores = rows.score(tokens, parents)
        for r, ids in enumerate(texts):
            for node in range(sizes[r]):
                got.append(scores[r][node])
                paths.append(ids + [tokens[r][i] for i in path_to(parents[r], node)])
        kept = [path_to(parents[r], rng.randrange(sizes[r])) for r in range(len(texts))]
        rows.keep(kept)
        texts = [ids + [tokens[r][i] for i in kept[r]] for r, ids in enumerate(texts)]
    worst = off(target, got, paths)
    check = Check(
        f"{len(got)} nodes, {len(texts)} texts",
        verdict(worst <= 1),
        f"the largest difference is {worst:.2g} of what is allowed in {target.lm.dtype}",
        {"worst": worst, "num_nodes": len(got)},
    )
    return Section("Tree scores", "One forward for a tree gives the logits of plain forwards, path by path.", (check,))


def greedy(engine: Engine, seed: int) -> Section:
    """Check that at temperature 0 speculation gives the text of plain decoding, alone and in a batch.

    No token ends these texts, since one that ended at its first token would compare nothing.

    engine: the models.
    seed: of random prompts.
    """
    texts = prompts(engine, seed)

    def run(drafter: Drafter, batch: int) -> tuple[list[list[int]], int]:
        """Return the ids of each text, and the number of draft tokens that were accepted in all of them."""
        part = replace(engine, drafter=drafter, max_batch=batch, eos_ids=frozenset())
        with warnings.catch_warnings():  # else a broken drafter would pass as plain decoding
            warnings.simplefilter("error", DraftFailedWarning)
            results = part.generate(texts, max_new_tokens=GREEDY_TOKENS, temperature=0.0, seed=seed)
        assert isinstance(results, list)
        return [result.token_ids for result in results], sum(result.stats.num_accepted for result in results)

    want, _ = run(NoDrafter(), 1)
    checks = []
    for batch in (1, len(texts)):
        ties, wrong = [], []
        got, accepted = run(engine.drafter, batch)
        for prompt, one, other in zip(texts, want, got, strict=True):
            if one != other:
                tie, what = _parting(engine.target, prompt, one, other)
                (ties if tie else wrong).append(what)
        same = len(texts) - len(ties) - len(wrong)
        tested = accepted > 0 or isinstance(engine.drafter, NoDrafter)
        detail = f"{same} of {len(texts)} texts of {GREEDY_TOKENS} tokens equal"
        detail += f"; {accepted} drafts accepted" if tested else UNTESTED
        detail += "".join(f"; float tie: {what}" for what in ties) + "".join(f"; {what}" for what in wrong)
        numbers = {"num_equal": same, "num_ties": len(ties), "num_wrong": len(wrong), "accepted": accepted}
        checks.append(Check(f"batch {batch}", FAILED if wrong else OK if tested else WEAK, detail, numbers))
    method = "At temperature 0 the text with speculation is that of plain decoding."
    return Section("Greedy text", method, tuple(checks))


def _parting(target: LMTarget, prompt: list[int], one: list[int], other: list[int]) -> tuple[bool, str]:
    """Return (whether two texts first differ where their two logits are the largest up to rounding, that in words)."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if at == min(len(one), len(other)):
        return False, f"one text ends at token {at}, the other goes on"
    logits = last_logits(target, [prompt + one[:at]])[0]
    gap = float(logits.max() - logits[[one[at], other[at]]].min())
    allowed = 2 * _tolerance(target, logits)
    return gap <= allowed, f"texts part at token {at}, where the logits are {gap:.1e} apart (rounding: {allowed:.1e})"


def sampled(engine: Engine, temperature: float, samples: int, seed: int, progress: Callable[[str], None]) -> Section:
    """Test whether the joint law of NUM_TOKENS sampled tokens is the target's own, and whether a wrong law is seen.

    engine: the models.
    temperature: of the texts, above 0.
    samples: the number of texts, of two prompts together.
    seed: of the draws.
    progress: shows what is done now.
    """
    sampling = Sampling(temperature=temperature)
    chosen = prompts(engine, seed)[:2]
    alpha = FALSE_ALARM / len(chosen)
    prepared = [_prepare(engine.target, prompt, sampling, samples // len(chosen), alpha, seed) for prompt in chosen]
    checks = []
    for number, (prompt, (test, cells, off)) in enumerate(zip(chosen, prepared, strict=True), start=1):
        progress(f"sampling {test.num_samples} generations after prompt {number}")
        tell = countdown(test.num_samples, progress)
        ids, accepted = sample(
            engine.target, engine.drafter, engine.verifier, prompt, sampling, test.num_samples, seed + number, tell
        )
        counts = cells.count(ids)
        p_value, power = test.p_value(counts), test.power(off, seed)
        detail = (
            f"p-value {p_value:.2g} over {len(cells)} cells, {test.num_samples} samples; {accepted:.2f} drafts "
            f"accepted each; a temperature 15% too low would be seen with probability {power:.2f}"
        )
        numbers = {"p_value": p_value, "num_cells": len(cells), "num_samples": test.num_samples, "power": power}
        tested = accepted >= LEAST_ACCEPTED or isinstance(engine.drafter, NoDrafter)
        detail += "" if tested else UNTESTED
        outcome = FAILED if p_value <= alpha else OK if tested and power >= LEAST_POWER else WEAK
        checks.append(Check(f"prompt {number}", outcome, detail, {**numbers, "accepted": accepted}))
    checks.append(_wrong_rule(engine, chosen[0], sampling, *prepared[0][:2], seed, progress))
    method = (
        f"Law of {NUM_TOKENS} tokens after a prompt at temperature {temperature:g}, against plain forwards; the cells\n"
        f"were fixed before sampling. False alarms: at most {FALSE_ALARM:g} for all prompts together ({alpha:g} each)."
    )
    return Section("Sampled text", method, tuple(checks))


def _prepare(
    target: LMTarget, prompt: list[int], sampling: Sampling, samples: int, alpha: float, seed: int
) -> tuple[fit.FitTest, fit.Cells, np.ndarray]:
    """Return (the test, its cells, the cells' probabilities at a temperature 15% lower)."""

    def law(setting: Sampling) -> fit.Next:
        return lambda ids: setting(last_logits(target, [prompt + list(x) for x in ids]))

    cells = fit.choose_cells(law(sampling), NUM_TOKENS, samples)
    test = fit.FitTest(cells.probabilities(law(sampling)), samples, alpha, seed)
    return test, cells, cells.probabilities(law(replace(sampling, temperature=0.85 * sampling.temperature)))


def _wrong_rule(
    engine: Engine,
    prompt: list[int],
    sampling: Sampling,
    test: fit.FitTest,
    cells: fit.Cells,
    seed: int,
    progress: Callable[[str], None],
) -> Check:
    """Check that the test rejects a rule known to be lossy; this needs a drafter whose draft tokens have a q."""
    name = "known-wrong rule"
    model = model_of(engine.drafter)
    if not isinstance(model, LMDrafter) or isinstance(model, ProductDrafter):
        return Check(
            name, NONE, f"does not apply to drafter {model.name}: it is put in where a language model or a head drafts"
        )
    drafter = replace(model, policy=static.kary(4, NUM_TOKENS - 1), law=IID)
    samples = test.num_samples
    progress(f"sampling {samples} generations with a rule known to be wrong")
    tell = countdown(samples, progress)
    ids, _ = sample(engine.target, drafter, LikeliestDraft(), prompt, sampling, samples, seed + 1000, tell)
    p_value = test.p_value(cells.count(ids))
    seen = p_value <= test.alpha
    detail = f"rejected as it must be, p-value {p_value:.2g}, {samples} samples"
    if not seen:
        detail = f"NOT seen, p-value {p_value:.2g}: one token has nearly all of p here, or take more --samples"
    return Check(name, OK if seen else WEAK, detail, {"p_value": p_value, "num_samples": samples})


def sample(
    target: LMTarget,
    drafter: Drafter,
    verifier: Verifier,
    prompt: list[int],
    sampling: Sampling,
    samples: int,
    seed: int,
    tell: Callable[[int], None] = lambda done: None,
) -> tuple[list[tuple[int, ...]], float]:
    """Return (the first NUM_TOKENS ids of each generation, the mean number of accepted draft tokens of one).

    target, drafter, verifier: what decodes.
    prompt: the ids before them.
    sampling: how logits become probabilities.
    samples: the number of generations, each with a seed of its own.
    seed: makes these seeds.
    tell: is called after each batch with the number of generations that are done.
    """
    decoder = Decoder(target, drafter, verifier, BATCH, len(prompt) + NUM_TOKENS + drafter.max_nodes)
    done: list[tuple[int, ...]] = []
    accepted = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftFailedWarning)  # else a broken drafter would pass as plain decoding
        together = samples - samples // ALONE
        for first, last in pairwise([0, *range(BATCH, together, BATCH), *range(together, samples + 1)]):
            for i in range(first, last):
                rng = seeded(1_000_003 * seed + i)
                decoder.join(Running(list(prompt), sampling, rng, NUM_TOKENS))
            _prefill(decoder, prompt)
            while decoder.sequences:
                for sequence, step in decoder.step():
                    accepted += step.num_accepted
                    if sequence.finished:
                        done.append(tuple(sequence.ids[len(prompt) :]))
            tell(len(done))
    return done, accepted / samples


def countdown(total: int, progress: Callable[[str], None]) -> Callable[[int], None]:
    """Return the function that reports a number of finished generations, at most every 10 seconds.

    total: the number of generations.
    progress: gets the line, with the time that is left.
    """
    begun = last = time.perf_counter()

    def tell(done: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if done < total and now - last >= TELL_S:
            last = now
            progress(f"{done} of {total} generations, {(now - begun) / done * (total - done) / 60:.1f} min left")

    return tell


def _prefill(decoder: Decoder, prompt: list[int]) -> None:
    """Let the target read the prompt in all rows at once, as one chain each, since it would read row by row."""
    read = prompt[:-1]
    if read and isinstance(decoder.target, LMTargetSession):
        rows, b = decoder.target.rows, len(decoder.sequences)
        rows.score([read] * b, [range(-1, len(read) - 1)] * b)
        rows.keep([range(len(read))] * b)
