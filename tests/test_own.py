"""The target itself as drafter: its weights in 4 bits, in its own slot cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import foretoken
from engines import check_greedy, ids_of
from foretoken.audit import models
from foretoken.audit.report import OK
from foretoken.core.errors import ForetokenError
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder, DraftFailedWarning
from foretoken.draft.own import OwnDrafter
from foretoken.kernel import chain
from foretoken.kernel.screen import AGAIN
from foretoken.kernel.sizes import COLUMNS
from foretoken.models.fused_rows import FusedRows, GuestRows
from foretoken.models.llama_kernel import KernelRows
from foretoken.models.panels import PackedLinear
from foretoken.models.quantised import HEAD_KIND
from foretoken.models.target import LMTargetSession
from models_zoo import tiny
from thinning import one_in
from tiny import tokenizer
from watching import calls_of

TEXTS = [[17, 4, 90], [25, 3, 77, 12, 8, 41], [5] * 30, [1, 2]]
TREES = ("chain:4", "kary:2x3", "delayed:2+2x2", "budget:8", "dynamic:8")
WIDE = (AGAIN + 9) * COLUMNS - 7  # tokens, of which the drafter has some in 4 bits alone
FOLDERS = {"llama": torch.bfloat16, "mistral": torch.float32, "qwen3": torch.bfloat16}  # Mistral's window is 9 tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One target of each family, in the dtype that FOLDERS names."""
    base = tmp_path_factory.mktemp("targets")
    for family, dtype in FOLDERS.items():
        nn.Module.to(tiny(family, random_weights=True, head_dim=16), dtype).save_pretrained(base / family)
    wide = tiny("llama", random_weights=True, head_dim=16, vocab_size=WIDE)
    nn.Module.to(wide, torch.bfloat16).save_pretrained(base / "wide")
    return {family: base / family for family in (*FOLDERS, "wide")}


def load(folder: Path, **options: Any) -> foretoken.Engine:
    return foretoken.load(folder, tokenizer=tokenizer(), max_batch=len(TEXTS), **{"drafter": "self", **options})


@pytest.mark.parametrize("family", one_in(len(FOLDERS), FOLDERS))
def test_greedy_text_is_that_of_plain_decoding_bit_for_bit(folders: dict[str, Path], family: str) -> None:
    options = {"max_new_tokens": 20, "temperature": 0.0}
    want = ids_of(load(folders[family], drafter="none").generate(TEXTS, **options))  # by weights nobody else has used
    for setting in [*({"tree": tree} for tree in TREES), {"method": "auto"}]:
        engine = load(folders[family], **setting)
        results = engine.generate(TEXTS, **options)
        assert ids_of(results) == want, setting
        assert [engine.generate(text, **options).token_ids for text in TEXTS[:2]] == want[:2], setting
        if setting == {"tree": "chain:4"}:  # it drafts, and not at random
            assert sum(r.stats.num_accepted for r in results) > sum(r.stats.num_drafted for r in results) / 2


def decoder(engine: foretoken.Engine) -> Decoder:
    made = Decoder(engine.target, engine.drafter, engine.verifier, len(TEXTS), 80)
    for seed, ids in enumerate(TEXTS):
        made.join(Sequence(list(ids), Sampling(temperature=0.0), seeded(seed), 12 + 3 * seed, frozenset()))
    return made


@pytest.mark.parametrize("tree", ["chain:4", "kary:2x3"])
def test_what_stays_in_the_cache_is_the_targets_own(folders: dict[str, Path], tree: str) -> None:
    """Bit for bit what plain decoding leaves there, while sequences leave at different steps."""
    drafting, alone = decoder(load(folders["llama"], tree=tree)), decoder(load(folders["llama"], drafter="none"))
    for one in (drafting, alone):
        while len(one.sequences) > 1:
            one.step()
    check_cache(drafting, alone)


@pytest.mark.parametrize("tree", ["chain:8", "chain:8@0.00001"])
def test_guesses_leave_nothing_in_the_cache_of_the_target(
    folders: dict[str, Path], tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right ones and wrong ones, which a chain for one text reads, also where it ends before what was guessed."""
    done, real = [], chain.draft_chain

    def counted(*given: Any) -> tuple[int, int]:
        done.append(real(*given))
        return done[-1]

    monkeypatch.setattr(chain, "draft_chain", counted)
    both = [Decoder(e.target, e.drafter, e.verifier, 1, 120)
            for e in (load(folders["llama"], tree=tree), load(folders["llama"], drafter="none"))]  # fmt: skip
    for one in both:
        one.join(Sequence([5, 9, 5, 7, 5] * 6, Sampling(temperature=0.0), seeded(0), 60, frozenset()))
        while one.sequences and len(one.sequences[0].ids) < 70:
            one.step()
    assert any(1 < forwards < levels for levels, forwards in done)
    check_cache(*both)


def check_cache(drafting: Decoder, alone: Decoder) -> None:
    """The keys and values of the first sequence, as far as both have them, bit for bit."""
    sessions = [one.target for one in (drafting, alone)]
    assert all(isinstance(session, LMTargetSession) for session in sessions)
    length = min(session.rows.lengths[0] for session in sessions)  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for session, one in zip(sessions, (drafting, alone), strict=True):
        slots: Any = session.rows.cache  # pyright: ignore[reportAttributeAccessIssue]
        parts = slots.keys[:, 0, :, 0, :, :length], slots.values[:, 0, :, : length // 2]
        found.append((one.sequences[0].ids[:length], *parts))
    (ids, keys, values), (other_ids, other_keys, other_values) = found
    assert ids == other_ids
    assert len(ids) > drafting.sequences[0].num_prompt
    assert np.array_equal(keys.view(np.int32), other_keys.view(np.int32))
    assert np.array_equal(values.view(np.int32), other_values.view(np.int32))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("tree", "rule"), one_in(3, [("kary:2x2", "rrsw"), ("chain:3", None), ("budget:6", None)]))
def test_sampled_text_follows_the_targets_law(folders: dict[str, Path], tree: str, rule: str | None) -> None:
    """Goodness of fit of 1200 generations; false alarms: models.FALSE_ALARM for each case."""
    engine = replace(load(folders["llama"], tree=tree, verifier=rule), eos_ids=frozenset())
    section = models.sampled(engine, 0.5, 1200, 0, lambda _: None)
    assert [check.outcome for check in section.checks[:2]] == [OK, OK]
    assert [check.outcome for check in models.greedy(engine, 0).checks] == [OK, OK]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tree", one_in(2, ["chain:3", "kary:2x2"]))
def test_the_law_holds_where_some_tokens_are_in_4_bits(folders: dict[str, Path], tree: str) -> None:
    """Goodness of fit as above, by a drafter whose LM head has a screen, which its target's has not."""
    engine = replace(load(folders["wide"], tree=tree), eos_ids=frozenset())
    drafter, target = engine.source.lm.backend, engine.target.lm.backend
    assert drafter.head.screen != 0
    assert target.head.screen == 0
    assert models.sampled(engine, 0.2, 1200, 0, lambda _: None).checks[0].outcome == OK
    assert [check.outcome for check in models.greedy(engine, 0).checks] == [OK, OK]


def test_a_chain_and_single_levels_draw_the_same_by_a_screen(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a compiled loop drafts or one forward per level: the same texts, bit for bit."""
    compiled = calls_of(monkeypatch, KernelRows, "draft_chain")
    engine = load(folders["wide"], tree="chain:4")
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    want, calls = engine.generate(TEXTS[0], **options), len(compiled)
    assert calls > 0
    monkeypatch.setattr(FusedRows, "drafts_chains", lambda *_: False)
    assert engine.generate(TEXTS[0], **options).token_ids == want.token_ids
    assert len(compiled) == calls


def test_with_exact_match_a_seed_gives_plain_decodings_text(folders: dict[str, Path]) -> None:
    options = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3}
    want = load(folders["llama"], drafter="none").generate(TEXTS, **options)
    got = load(folders["llama"], verifier="exact-match", tree="chain:3").generate(TEXTS, **options)
    assert ids_of(got) == ids_of(want)


def test_it_reads_no_prompt_and_keeps_no_cache_of_its_own(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], tree="chain:4")
    made = decoder(engine)
    session = made.drafter
    host, guest = made.target.rows, session.inner.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(guest, GuestRows)
    assert guest.cache.keys is host.cache.keys
    assert guest.cache.values is host.cache.values
    assert guest.lengths is host.lengths
    with pytest.raises(ForetokenError, match="its host, which commits the text"):
        guest.extend(0, [1])
    assert isinstance(engine.drafter, OwnDrafter)
    assert kinds(engine) == {"q4_1", HEAD_KIND}
    assert kinds(load(folders["llama"], drafter="self:q5_0")) == {"q5_0", HEAD_KIND}


def kinds(engine: foretoken.Engine) -> set[str]:
    """Of the drafter's packed weights."""
    return {m.kind for m in engine.source.model.model.modules() if isinstance(m, PackedLinear)}


def test_drafter_auto_is_self_where_that_pays_and_lookup_elsewhere(folders: dict[str, Path], tmp_path: Path) -> None:
    tiny("llama", random_weights=True, hidden_size=48, intermediate_size=48, num_attention_heads=3,
         num_key_value_heads=3, head_dim=16).save_pretrained(tmp_path / "narrow")  # fmt: skip
    cases = [
        (folders["llama"], {}, "self"),
        (folders["mistral"], {"method": "auto"}, "self"),
        (folders["llama"], {"compile": "off"}, "ngram"),
        (folders["llama"], {"quantise": "q4_0"}, "ngram"),
        (folders["llama"], {"law": "opaque"}, "ngram"),  # a law that the rule for self does not take
        (folders["llama"], {"law": "opaque", "verifier": "exact-match"}, "self"),
        (folders["llama"], {"verifier": "block"}, "self"),
        (tmp_path / "narrow", {}, "ngram"),
    ]
    for folder, options, kind in cases:
        engine = load(folder, drafter="auto", **options)
        assert engine.kind == kind, options
        assert engine.drafter.name.startswith("ngram") == (kind == "ngram" or "method" in options), options
        plain = load(folder, drafter="none", **options)
        assert ids_of(check_greedy(engine, TEXTS, 12)) == ids_of(
            plain.generate(TEXTS, max_new_tokens=12, temperature=0.0)
        )


@pytest.mark.parametrize("at", range(3, 8))
def test_a_drafter_that_fails_costs_speed_only(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """It fails after it left NaN in the target's cache, in slots of either place in a word."""
    engine = load(folders["llama"], tree="kary:2x3")
    score, calls = KernelRows.score_tree, 0

    def failing(self: KernelRows, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        out = score(self, *arguments, **named)
        if self.layers is not engine.target.lm.backend:
            calls += 1
            if calls == at:
                nan = np.uint32(0x7FC07FC0)  # of both bfloat16 numbers of a word, as overflows in 4 bits would leave
                for row, (first, *_) in enumerate(self.at.slots):
                    self.values.view(np.uint32)[:, row, :, (first + 1) // 2 :] = nan
                    self.keys.view(np.uint32)[:, row, :, first // 64, :, first % 64 :] = nan
                raise ValueError("broken")
        return out

    monkeypatch.setattr(KernelRows, "score_tree", failing)
    with pytest.warns(DraftFailedWarning, match="broken"):
        check_greedy(engine, TEXTS, 16)


def test_widths_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    narrow = tiny("llama", random_weights=True, hidden_size=48, intermediate_size=48, num_attention_heads=3,
                  num_key_value_heads=1, head_dim=16)  # fmt: skip
    narrow.save_pretrained(tmp_path / "narrow")
    with pytest.raises(ForetokenError, match="packs rows of multiples of 32 weights"):
        load(tmp_path / "narrow")


def test_its_memory_is_that_of_the_packed_weights(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    embeddings = [lm.weights.get_input_embeddings() for lm in (engine.target.lm, engine.source.model)]
    assert embeddings[0] is embeddings[1]
