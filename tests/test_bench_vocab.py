"""The benchmark of vocabularies, and the paper's table of combinations."""

from dataclasses import replace

import pytest

import tiny
import tokenizers_zoo as zoo
from benchmarks import vocab as vocab_bench
from benchmarks.vocab import Settings, Way, bench
from foretoken.build import load
from foretoken.cli.options import demo_folder
from foretoken.core.laws import Opaque
from foretoken.core.tree import Siblings, chain
from foretoken.measure.clocks import Drafts
from foretoken.measure.methods import Foretoken, Run, Transformers
from foretoken.measure.report import Report
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

pytestmark = pytest.mark.long


class Lossy(Foretoken):
    """The temperature is half of what was asked for, and a prompt's last token is dropped."""

    def run(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        return super().run([ids[:-1] for ids in prompts], max_new_tokens, temperature / 2, seed)


class Sharper(Transformers):
    def run(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        return super().run(prompts, max_new_tokens, temperature / 4, seed)


class Broken(Transformers):
    def run(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int) -> Run:
        raise IndexError("index out of range")


@pytest.mark.usefixtures("unchecked")
def test_each_way_is_measured_and_what_is_lossy_is_seen():
    model = tiny.llama(0, vocab=len(zoo.byte_level()))
    model.generation_config.eos_token_id = None
    engine = load(model, tokenizer=zoo.byte_level(), device="cpu")
    small = load(tiny.llama(1, vocab=257), tokenizer=zoo.byte_only(), device="cpu").target.lm
    translation = Translation(vocabulary(zoo.byte_level()), vocabulary(zoo.byte_only()))
    drafter = SLRSDrafter(small, translation, static.chain(2), vocab_size=engine.target.vocab_size)
    strings = replace(engine, drafter=drafter, verifier=VERIFIERS["string-rejection"])
    ways = [
        Way("plain", "-", "-", Foretoken(engine)),
        Way("plain", "-", "-", Transformers("plain", model)),
        Way("slrs", "small", "chain:2", Foretoken(strings)),
        Way("lossy", "-", "-", Lossy(engine)),
        Way("sharper", "-", "-", Sharper("sharper", model)),
        Way("broken", "-", "-", Broken("broken", model)),
    ]
    report = Report("test", {})
    settings = Settings((0.0, 0.4), [[5, 6, 7, 8, 9]], 8, 1, 120, 0)
    bench(report, ways, engine.target, settings, lambda _: None)
    greedy, sampled = report.tables
    laws = {row[0].split()[-1]: row[-1] for row in greedy.rows}
    assert laws == {"plain": "1/1 equal", "slrs": "1/1 equal", "lossy": "0/1 equal", "sharper": "1/1 equal"} | {
        "broken": "failed: IndexError"
    }
    laws = {row[0].split()[-1]: row[-1] for row in sampled.rows}
    assert laws["slrs"].startswith("p")
    assert laws["sharper"].startswith("WRONG")
    assert laws["broken"] == "failed: IndexError"
    plain, strings = greedy.rows[0], greedy.rows[2]
    assert plain[4] == plain[5] == plain[6] == 1
    assert strings[6] >= 1
    assert strings[8] == 0  # every byte is a token of the target
    assert 0 < strings[9] < 1
    # The milliseconds of all 8 tokens, less those to the first, are so many later tokens' that this many came first.
    came_first, drafted_first = (8 - (8000 / row[3] - row[10]) / row[11] for row in (plain, strings))
    assert came_first == pytest.approx(1)
    assert 1 <= round(drafted_first) <= 3
    assert drafted_first == pytest.approx(round(drafted_first))
    assert len(vocab_bench.COLUMNS) == len(plain)


def test_the_table_of_combinations_has_the_papers_numbers_where_they_follow(cli):
    out = cli.json("benchmarks", "reproduce", "slrs-table5", "--quick")
    lemma = out["tables"][0]["rows"]
    assert len(lemma) == 7
    assert all(row["paper"] == row["ours"] for row in lemma)
    combined = {row[""]: row for row in out["tables"][2]["rows"]}
    assert combined["maximum"]["target by drafter-bytes"] == 1
    assert combined["median"]["target by drafter-1k"] > 1
    shares = [row["target by drafter-1k"] for row in out["tables"][4]["rows"]]
    assert sum(shares) == pytest.approx(1)
    assert 0 < max(shares) < 1


def test_the_tables_of_vocabularies_name_every_ordered_pair(cli):
    sizes, survive, shares = cli.json("benchmarks", "reproduce", "slrs-tables8-11", "--quick")["tables"]
    names = [row["vocabulary"] for row in sizes["rows"]]
    assert {"target", "drafter-1k", "drafter-bytes"} <= set(names)
    assert all(row["code"] == 1 for row in survive["rows"] if row["vocabulary"] in ("target", "drafter-bytes"))
    found = {(row["target"], row["drafter"]): row for row in shares["rows"]}
    assert len(found) == len(names) * (len(names) - 1)
    assert found["drafter-bytes", "target"]["of the target's"] == 1  # the target has every byte
    there, back = found["target", "drafter-1k"], found["drafter-1k", "target"]
    assert there["common"] == back["common"] == round(there["of the target's"] * 4096)


def test_drafts_that_are_no_token_are_counted():
    """Of three nodes that were to have a child two had none; the last tree's root was to have none."""
    drafts, none = Drafts(), Siblings((), None, Opaque(1))
    for _ in range(2):
        drafts.count([chain([3, 1], [Siblings((1,), None, Opaque(1)), none]), chain([4], [none]), chain([4], [None])])
    assert (drafts.nodes, drafts.empty) == (6, 4)


def rows_of(cli, *options: object) -> list[dict]:
    models = ("--target", demo_folder() / "target", "--drafter", demo_folder() / "drafter-1k")
    fast = ("--prompts", 1, "--rounds", 1, "--samples", 0)
    return cli.json("benchmarks", "vocab", *models, *fast, *options)["tables"][0]["rows"]


def test_limits_of_slrs_the_share_of_none_and_alignments_of_slem(cli):
    limits = ["--method", "slrs", "--lookahead", 1, "--lookahead", 3, "--method", "slem", "--alignments"]
    rows = {row["way"]: row for row in rows_of(cli, "--max-new-tokens", 8, "--temperature", 1, *limits)}
    ways = ["foretoken slrs", "foretoken slrs n=1", "foretoken slrs n=3"]
    assert [name for name in rows if "slrs" in name] == ways
    assert all(0 <= rows[name]["none"] <= 1 for name in ways)
    assert rows["foretoken plain"]["none"] is None
    alignments = ["slem", "slem overlap", "slem unhealed", "slem overlap unhealed"]
    assert [name for name in rows if "slem" in name] == [f"foretoken {what}" for what in alignments]


def test_the_trees_asked_for_are_taken(cli):
    trees = ["--tree", "tli=chain:1", "--tree", "tli=kary:2x1"]
    rows = rows_of(cli, "--max-new-tokens", 4, "--temperature", 0, "--method", "tli", *trees)
    assert [row["tree"] for row in rows if row["way"].endswith("tli")] == ["chain:1", "kary:2x1"]
