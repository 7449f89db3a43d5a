"""Constrained generation: every text is in the grammar, and its law is the target's, masked at every token."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import foretoken
import tiny
import tiny_tables as tables
import tokenizers_zoo as zoo
from foretoken import ForetokenError, Grammar
from foretoken.audit.decoding import Ids, deviation
from foretoken.audit.table import TableLM, random_table
from foretoken.cli.options import TextOptions
from foretoken.core.errors import GrammarError
from foretoken.core.laws import IID, Opaque, WithoutReplacement
from foretoken.core.permitted import permitted
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.core.tree import Siblings, opaque_tree
from foretoken.decode import NoDrafter
from foretoken.draft.lm import LMDrafter
from foretoken.draft.lookup import LookupDrafter
from foretoken.models.grammar import GrammarConstraint
from foretoken.models.text import TextStream
from foretoken.serve.batch import Batch
from foretoken.serve.worker import Worker
from foretoken.trees import static
from foretoken.verify import VERIFIERS
from foretoken.vocab.slem import SLEMDrafter
from foretoken.vocab.slrs import SLRSDrafter
from foretoken.vocab.vocabulary import vocabulary
from listening import asked, finish, job
from thinning import one_in

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICE = {"anyOf": [{"const": "yes"}, {"const": "no"}, {"type": "boolean"}, {"type": "null"}]}
PHONE = r"[0-9]{3}-[0-9]{4}"
GREEK = "(α|β|é|日本){1,4}"  # characters of several tokens
SUM = 'start: num (" + " num)*\nnum: /[0-9]{1,2}/'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 5
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"red", "green"}
    )


GRAMMARS: list[tuple[Grammar, Callable[[str], object]]] = [
    (Grammar.json_schema(PERSON), is_person),
    (Grammar.json_schema(json.dumps(CHOICE)), lambda text: json.loads(text) in ("yes", "no", True, False, None)),
    (Grammar.regex(PHONE), re.compile(PHONE).fullmatch),
    (Grammar.regex(GREEK), re.compile(GREEK).fullmatch),
    (Grammar.lark(SUM), re.compile(r"[0-9]{1,2}( \+ [0-9]{1,2})*").fullmatch),
]


@pytest.fixture(scope="module")
def engines() -> dict[str, foretoken.Engine]:
    """A model of random weights, alone, with a drafter beside it, with prompt lookup, and with another vocabulary."""
    model, core = tiny.llama(0), tiny.tokenizer()
    extra = ("in", "12", '":', "true", ", ")
    other, its = tiny.llama(3, vocab=257 + len(extra)), tiny.tokenizer(extra)
    load = foretoken.load
    return {
        "plain": load(model, tokenizer=core),
        "chain": load(model, drafter=tiny.perturbed(model, 0.05, 1), tokenizer=core),
        "tree": load(model, drafter=tiny.perturbed(model, 0.05, 1), tokenizer=core, tree="kary:2x3"),
        "likeliest": load(model, drafter=tiny.perturbed(model, 0.05, 1), tokenizer=core, tree="dynamic:12"),
        "auto": load(model, drafter=tiny.perturbed(model, 0.05, 1), tokenizer=core, method="auto"),
        "ngram": load(model, drafter="ngram", tokenizer=core, tree="kary:2x3"),
        "tli": load(model, drafter=other, tokenizer=core, drafter_tokenizer=its, vocab="tli"),
        "slem": load(model, drafter=other, tokenizer=core, drafter_tokenizer=its, vocab="slem"),
        "slrs": load(model, drafter=other, tokenizer=core, drafter_tokenizer=its, vocab="slrs"),
    }


def texts(engine: foretoken.Engine, grammar: Grammar, number: int, temperature: float = 1.0) -> list[str]:
    """Of `number` texts side by side those that are no mere beginnings: all but a few must be."""
    prompts = ["12 + 3 = ", '{"name": "é'] * (number // 2)
    results = engine.generate(prompts, grammar=grammar, max_new_tokens=80, temperature=temperature, seed=5)
    return [result.text for result in results if result.finish_reason == "stop"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "kind", one_in(4, ["chain", "plain", "tree", "likeliest", "auto", "ngram", "tli", "slem", "slrs"])
)
def test_every_text_is_in_the_grammar_and_greedy_texts_are_those_of_plain_decoding(engines, kind):
    for grammar, valid in GRAMMARS if kind == "chain" else GRAMMARS[2:4]:
        found = texts(engines[kind], grammar, 8)
        assert len(found) > 5
        assert all(valid(text) for text in found), found
        assert texts(engines[kind], grammar, 2, 0.0) == texts(engines["plain"], grammar, 2, 0.0)


def test_a_grammar_that_is_too_much_for_its_parser_ends_its_own_text_alone(engines, monkeypatch):
    """The parser fails in the middle of a step, which texts beside it in a server need not repeat."""
    engine, repeated = engines["chain"], []
    endless = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": False}
    grammar = Grammar.json_schema(endless)
    with pytest.raises(GrammarError, match="or has no text"):
        engine.generate(["x", "y"], grammar=grammar, max_new_tokens=80)
    monkeypatch.setattr(Batch, "_step_alone", lambda self, undos, short=False: repeated.append(len(undos)))
    worker = Worker(engine, max_batch=2)
    held = grammar.constraint(engine.tokenizer, engine.eos_ids, len(engine.encode("12")))
    bad = asked(worker, job(engine, "12", sampling={"processors": (held,)}))
    good = asked(worker, job(engine, "12 + 3 = ", 5))
    finish(worker, good, bad)
    worker.stop()
    assert good.ids == engine.generate("12 + 3 = ", max_new_tokens=24, temperature=0.8, seed=5).token_ids
    assert (bad.news[-1].status, repeated) == (400, [])


def test_the_models_own_end_comes_only_where_the_grammar_can_end(engines):
    """And it is all that may come where it must; a text that is cut is a beginning of one."""
    engine = engines["chain"]
    done = engine.generate("x", grammar=Grammar.regex("abc"), temperature=1.0, seed=0)
    assert (done.text, done.finish_reason, done.token_ids[-1]) == ("abc", "stop", 0)
    cut = engine.generate("x", grammar=Grammar.regex("a{20}"), max_new_tokens=7, seed=0)
    assert (cut.text, cut.finish_reason) == ("aaaaaaa", "length")
    streamed = list(engine.stream("x", grammar=Grammar.regex("[ab]{5}"), seed=3))
    assert (
        "".join(chunk.text for chunk in streamed) == engine.generate("x", grammar=Grammar.regex("[ab]{5}"), seed=3).text
    )


def test_a_grammar_that_leaves_a_drafter_none_of_its_own_tokens_does_not_fail_it(engines):
    """The head of a drafter may be narrower than the target's: here it lacks every token of the text."""
    target = engines["plain"].target
    narrow = tiny.llama(4, vocab=60)
    drafter = LMDrafter(foretoken.load(narrow).target.lm, static.chain(3), IID, target.vocab_size)
    engine = replace(engines["plain"], drafter=drafter, verifier=VERIFIERS["standard"])
    assert engine.generate("+", grammar=Grammar.regex("z{9}"), seed=0).text == "z" * 9


# The exact law, by enumeration over two-letter tokenizers; the reference knows nothing of llguidance.
PATTERN = "a(b|ab)?|bb"
TEXTS = {"a", "ab", "aab", "bb"}


def held(target=tables.TARGET) -> GrammarConstraint:
    return Grammar.regex(PATTERN).constraint(target, frozenset({0}), 2)


def never_zero(seed: int) -> TableLM:
    """A target that may write any token anywhere, as the softmax of finite logits does."""
    return TableLM("T", (2 * random_table(len(tables.TARGET), seed)).softmax(-1))


def constrained_law(lm: TableLM, num_tokens: int, sampling: Sampling) -> dict[Ids, float]:
    """The target's p at every token, masked to what can still become one of TEXTS and renormalised."""
    spelled = vocabulary(tables.TARGET).tokens
    laws, law = {(): 1.0}, {}
    while laws:
        ids, prob = laws.popitem()
        if len(ids) == num_tokens or 0 in ids:
            law[ids] = prob
            continue
        text = b"".join(spelled[i] or b"" for i in ids).decode()
        rows = lm.open(1, 16)
        rows.join()
        (logits,) = rows.score([[1, 2, *ids]], [range(-1, len(ids) + 1)])
        p = sampling(logits[-1:])[0]
        allowed = [
            text in TEXTS if i == 0 else any(t.startswith(text + (spelled[i] or b"").decode()) for t in TEXTS)
            for i in range(len(p))
        ]
        p = p * torch.tensor(allowed)
        for i, weight in enumerate((p / p.sum()).tolist()):
            if weight > 0:
                laws[(*ids, i)] = prob * weight
    return law


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "verifier", "temperature"),
    [
        ("none", "exact-match", 0.7), ("ngram", "exact-match", 1.0), ("iid", "standard", 0.7), ("iid", "block", 1.0),
        ("tree", "rrsw", 0.7), ("likeliest", "exact-match", 1.0), ("slem", "exact-match", 0.7),
        ("slrs", "string-rejection", 1.0),
    ],
)  # fmt: skip
def test_the_law_is_that_of_plain_constrained_sampling(kind, verifier, temperature):
    lm, small = never_zero(3), tables.lms(seed=3)[1]
    same = tables.lms(tables.TARGET, seed=12)[1]
    drafter = {
        "none": NoDrafter(),
        "ngram": LookupDrafter(static.kary(2, 2)),
        "iid": LMDrafter(same, static.chain(2), IID, lm.vocab_size),
        "tree": LMDrafter(same, static.kary(2, 1), WithoutReplacement, lm.vocab_size),
        "likeliest": LMDrafter(same, static.kary(2, 2), Opaque, lm.vocab_size),
        "slem": SLEMDrafter(small, tables.translation(), static.kary(2, 2), Opaque, lm.vocab_size),
        "slrs": SLRSDrafter(small, tables.translation(), static.chain(1), vocab_size=lm.vocab_size),
    }[kind]
    num_tokens = 2 if kind == "slrs" else 3  # whose drafts alone have thousands of outcomes
    got = tables.law_of(lm, drafter, VERIFIERS[verifier], num_tokens, temperature=temperature, processors=(held(),))
    want = constrained_law(lm, num_tokens, Sampling(temperature=temperature))
    assert len(want) > 3
    assert deviation(got, want) < 1e-12


def test_the_enumeration_sees_a_wrong_rule(monkeypatch):
    """Sampled drafts that are forbidden must not be dropped as if they had never been drawn: that is another law."""
    lm, same = never_zero(3), tables.lms(tables.TARGET, seed=12)[1]
    drafter = LMDrafter(same, static.chain(1), IID, lm.vocab_size)

    def unmasked(session, seq, g, logits, suffixes):
        return seq.sampling.without_ids()(logits)

    def dropping(sequence, tree):
        siblings = tree.siblings[0]
        if siblings is not None and not held().allows(sequence.ids, siblings.draws[0]):
            tree = opaque_tree(tree.tokens[:1], [-1])
        return permitted(replace(sequence, sampling=Sampling()), tree)

    monkeypatch.setattr("foretoken.draft.lm.LMDraftSession._q", unmasked)
    want = constrained_law(lm, 3, Sampling())
    rule = VERIFIERS["standard"]
    assert deviation(tables.law_of(lm, drafter, rule, 3, processors=(held(),)), want) < 1e-12  # they are rejected
    monkeypatch.setattr("foretoken.decode.permitted", dropping)
    assert deviation(tables.law_of(lm, drafter, rule, 3, processors=(held(),)), want) > 1e-3


def test_forbidden_drafts_are_not_drafted_and_the_drafter_hears_of_its_own_nodes():
    """Of a tree over the letters a, b and ab (1, 2, 3): what the grammar forbids goes, and all below it."""
    tree = opaque_tree([2, 1, 2, 3, 2, 1, 2], [-1, 0, 0, 0, 1, 2, 2])  # a, b, ab; ab below a; ba and bb below b
    seq = Sequence([1, 2], Sampling(processors=(held(),)), seeded(0), 9)
    kept, places = permitted(seq, tree)
    assert kept.tokens == (2, 1, 2, 3, 2, 2)
    assert places == [0, 1, 2, 3, 4, 6]
    assert kept.siblings[2].draws == (2,)
    after_all = Sequence([1, 2, 2, 2], Sampling(processors=(held(),)), seeded(0), 9)  # bb: only the end may follow
    after_all.num_prompt = 2
    assert permitted(after_all, tree)[0].tokens == (2,)
    sampled = replace(tree, siblings=(Siblings((1, 2, 3), torch.ones(4) / 4, IID(3)), *tree.siblings[1:]))
    assert permitted(seq, sampled)[0].siblings[0] is sampled.siblings[0]


def test_a_constraint_answers_the_same_in_any_order(engines):
    """It goes back and forth between the nodes of a tree; a new one that reads each prefix from its start agrees."""
    grammar, core = Grammar.json_schema(PERSON), tiny.tokenizer()
    text = core('{"name": "x", "age": 12, "tags": ["red"]}')["input_ids"]
    one, scores = grammar.constraint(core, frozenset({0}), 1), torch.zeros(1, 257)
    prefixes = [text[:n] for n in (0, 5, 30, 12, len(text), 3)] + [[*text[:8], 9, 9], [1, 2], text[:20]]
    for prefix in prefixes:
        ids = torch.tensor([[77, *prefix]])
        fresh = grammar.constraint(core, frozenset({0}), 1)
        masked = one(ids, scores)
        assert torch.equal(masked, fresh(ids, scores))
        allowed = [token for token in range(257) if fresh.allows([77, *prefix], token)]
        assert allowed == torch.isfinite(masked[0]).nonzero()[:, 0].tolist()
        assert allowed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar.json_schema({"type": "objct"}), "Invalid type: objct"),
        (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (lambda: Grammar.json_schema("{"), "no JSON object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "no JSON object"),
        (lambda: Grammar.json_schema("[1]"), "no JSON object"),
        (lambda: Grammar.regex("a(b"), "unclosed group"),
        (lambda: Grammar.regex(7), "is a int"),
        (lambda: Grammar.lark("start: nothing"), "unknown name"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_grammar_that_cannot_be_enforced_is_refused_in_one_sentence(make, words):
    with pytest.raises(ForetokenError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_what_a_grammar_needs_is_told(engines):
    grammar = Grammar.regex("a")
    with pytest.raises(ForetokenError, match="tokenizer"):
        replace(engines["plain"], tokenizer=None).generate([1], grammar=grammar)
    with pytest.raises(ForetokenError, match="end-of-text"):
        replace(engines["plain"], eos_ids=frozenset()).generate("x", grammar=grammar)


def test_the_command_writes_what_a_schema_or_a_pattern_asks_for(run, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(CHOICE))
    assert GRAMMARS[1][1](run.json("generate", "x", "--json-schema", schema, "--seed", 1)["text"])
    code, out, _ = run("generate", "x", "--regex", PHONE, "--json")
    assert (code, bool(re.fullmatch(PHONE, json.loads(out)["text"]))) == (0, True)
    run.refused("unclosed group", "generate", "x", "--regex", "(")
    options = TextOptions(json_schema=str(schema))
    options.check()
    schema.unlink()  # it is read once, since it may be a pipe
    assert isinstance(options.arguments()["grammar"], Grammar)
    assert "Cannot read the JSON schema nowhere" in run("generate", "x", "--json-schema", "nowhere")[2]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "ngram", "tli", "slem", "slrs"])
def test_thousands_of_texts_are_in_the_grammar(engines, kind):
    for grammar, valid in GRAMMARS:
        found = texts(engines[kind], grammar, 200)
        assert len(found) > 150
        assert all(valid(text) for text in found), found


def a_space_first():
    tokenizer = zoo.byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def added():
    """Tokens that the decoder reads otherwise than they are written."""
    tokenizer = zoo.sentencepiece_bpe()
    tokenizer.add_tokens(["hex", "▁▁▁"])
    return tokenizer


def no_bytes():
    """As T5 itself."""
    core = Tokenizer(models.Unigram([("</s>", 0.0), *((piece, -1.0) for piece in zoo.SENTENCE)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁")
    core.decoder = decoders.Metaspace(replacement="▁")
    return zoo.wrap(core, eos_token="</s>")


@pytest.mark.parametrize("make", [zoo.byte_level, a_space_first, zoo.sentencepiece_bpe, added, zoo.unigram, no_bytes])
def test_a_grammar_is_held_as_the_tokenizers_own_decoder_writes_the_text(make):
    """Texts of tokens that are drawn among those that may come."""
    tokenizer, draw, ended = make(), random.Random(0), 0
    end, prompt = tokenizer.eos_token_id, tokenizer("the")["input_ids"]
    for pattern in ("(hex|the| the|hello| ){2,5}x", "   +a", "( h|e){2,4}"):
        grammar = Grammar.regex(pattern)
        for _ in range(10):
            held, ids = grammar.constraint(tokenizer, frozenset({end}), len(prompt)), list(prompt)
            while ids[-1] != end and len(ids) < 40:
                allowed = torch.nonzero(held(torch.tensor([ids]), torch.zeros(1, 400))[0] == 0)[:, 0].tolist()
                assert held.failed is None
                ids.append(draw.choice(allowed))
            stream = TextStream(tokenizer, (), prompt)
            text = stream.push(ids[len(prompt) :]) + stream.finish()
            ended += ids[-1] == end
            assert re.fullmatch(pattern, text) or ids[-1] != end
    assert ended > 20
