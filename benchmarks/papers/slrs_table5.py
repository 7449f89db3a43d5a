"""Timor et al. 2025, section 3.4 and appendix C (Table 5, Figures 1 to 3): how many spellings a token has."""

import itertools
from statistics import mean, median, pstdev

import numpy as np

from benchmarks.papers.run import Run
from foretoken.models.load import load_tokenizer
from foretoken.vocab.vocabulary import vocabulary

# Citations: Table 5, of the 150,000 shortest of Qwen2-7B-Instruct's 151,646 tokens.
SHORTEST = 150_000
LENGTH = {"mean": 6.21, "deviation": 2.87, "minimum": 1, "25%": 4, "median": 6, "75%": 8, "maximum": 17}
COMBINATIONS = {
    "mean": 144.31,
    "deviation": 880.98,
    "minimum": 1,
    "25%": 7,
    "median": 15,
    "75%": 56,
    "maximum": 65536,
}
HELLO, COMPLETE, FOUND = b"Hello", 16, 14  # citations: appendix C and Figure 1
MISSING = b"llo"  # the part that none of Figure 1's 14 sequences has
LONGEST, QUICK_LONGEST = 8, 5  # letters of the complete vocabulary of Lemma 3.1


def combinations(tokens: set[bytes], data: bytes) -> int:
    """Return how many sequences of `tokens` spell `data`: 2^(m-1) for m letters if every string is a token."""
    ways = [1]
    for end in range(1, len(data) + 1):
        ways.append(sum(ways[start] for start in range(end) if data[start:end] in tokens))
    return ways[-1]


def slrs_table5(run: Run) -> None:
    _lemma(run)
    _table(run)


def _lemma(run: Run) -> None:
    table = run.report.table("Lemma 3.1 and Figure 1: combinations of a token of m letters", ["case", "paper", "ours"])
    n = run.count(LONGEST, QUICK_LONGEST)
    complete = {bytes(letters) for m in range(1, n + 1) for letters in itertools.product(b"ab", repeat=m)}
    for m in range(1, n + 1):
        table.add(f"complete vocabulary, m = {m}", 2 ** (m - 1), combinations(complete, (b"ab" * n)[:m]))
    every = {HELLO[i:j] for i in range(len(HELLO)) for j in range(i + 1, len(HELLO) + 1)}
    table.add("'Hello', complete", COMPLETE, combinations(every, HELLO))
    table.add(f"'Hello', without '{MISSING.decode()}'", FOUND, combinations(every - {MISSING}, HELLO))
    table.notes.append(
        "Appendix C speaks of 'hello'; Figure 1 lists sequences for 'Hello'. The two it lacks of 16 are those with "
        f"'{MISSING.decode()}'."
    )


def _table(run: Run) -> None:
    folders = run.vocabularies
    own = {name: set(vocabulary(load_tokenizer(folder), name).ids) for name, folder in folders.items()}
    shortest = {name: sorted(tokens, key=lambda t: (len(t), t))[:SHORTEST] for name, tokens in own.items()}
    counts: dict[tuple[str, str], list[int]] = {}
    first = next(iter(own))
    for token_name, spelling_name in [(first, name) for name in own] + [(name, name) for name in list(own)[1:]]:
        run.progress(f"spelling the tokens of {token_name} with those of {spelling_name}")
        counts[token_name, spelling_name] = [combinations(own[spelling_name], t) for t in shortest[token_name]]
    columns = ["", "paper", *(f"{token} by {spelling}" for token, spelling in counts)]
    lengths = run.report.table("Table 5: bytes of a token", ["", "paper", *own], 2)
    sizes = {name: [len(token) for token in tokens] for name, tokens in shortest.items()}
    found = {name: _statistics(values) for name, values in sizes.items()}
    for what, paper in LENGTH.items():
        lengths.add(what, paper, *(found[name][what] for name in own))
    numbers = run.report.table("Table 5: combinations, tokens of one vocabulary by those of another", columns, 2)
    statistics = {pair: _statistics(values) for pair, values in counts.items()}
    for what, paper in COMBINATIONS.items():
        numbers.add(what, paper, *(statistics[pair][what] for pair in counts))
    numbers.notes.append(
        "Paper: tokens of Qwen2-7B-Instruct by its own; its characters are bytes. Ours: the 150,000 shortest tokens of "
        "the vocabularies named, in bytes, without special ones; the first in order where several are as long. Runs of "
        "spaces are what makes the maximum: a vocabulary that has all short runs is complete for them."
    )
    by_length = run.report.table("Figure 2: median combinations by bytes of a token", ["bytes", *columns[2:]], 1)
    for size in range(1, run.count(16, 8) + 1):
        row: list[float | None] = []
        for (token_name, _), values in counts.items():
            here = [value for n, value in zip(sizes[token_name], values, strict=True) if n == size]
            row.append(float(median(here)) if here else None)
        by_length.add(str(size), *row)
    histogram = run.report.table("Figure 3: share of the tokens by combinations", ["combinations", *columns[2:]], 4)
    histogram.add("none", *(values.count(0) / len(values) for values in counts.values()))
    for power in range(max(map(max, counts.values())).bit_length()):
        least, most = 2**power, 2 ** (power + 1) - 1
        shares = (sum(least <= n <= most for n in values) / len(values) for values in counts.values())
        histogram.add(f"{least} to {most}", *shares)


def _statistics(values: list[int]) -> dict[str, float]:
    low, middle, high = (float(x) for x in np.quantile(values, [0.25, 0.5, 0.75]))
    spread = {"mean": float(mean(values)), "deviation": pstdev(values), "minimum": float(min(values))}
    return {**spread, "25%": low, "median": middle, "75%": high, "maximum": float(max(values))}
