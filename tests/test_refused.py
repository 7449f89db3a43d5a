"""What `foretoken.load`, the functions of names and an engine's calls refuse: one sentence says what and why."""

from collections.abc import Callable
from typing import Any

import pytest

import foretoken
import tiny
import tokenizers_zoo as zoo
from foretoken.core.errors import ForetokenError
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts

pytestmark = pytest.mark.usefixtures("unchecked")  # which would refuse wrong types in a way of its own
Options = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target that the kernel takes, a drafter, and two draft heads."""
    root = tmp_path_factory.mktemp("refused")
    model = tiny.llama(0, hidden=64, layers=6)
    for kind in ("eagle", "medusa"):
        save_head(new_head(kind, parts(CausalLM(model))), root / kind)
    folders = {"target": tiny.save(model, root / "target"), "drafter": tiny.save(tiny.llama(1), root / "drafter")}
    return folders | {kind: str(root / kind) for kind in ("eagle", "medusa")}


@pytest.fixture(scope="module")
def engine(folders: dict[str, str]) -> foretoken.Engine:
    return foretoken.load(folders["target"], drafter=folders["drafter"], device="cpu")


NO_DRAFTER = r"No drafter is named, .*: name one, such as 'auto', or 'none' for plain"
NO_Q = "needs a drafter that gives each token a probability"
COINS = {"draft_probability": 0.5}
LOADED: list[tuple[Options, str]] = [  # beside {"drafter": "drafter"}
    *(
        ({"drafter": None, **named}, NO_DRAFTER)
        for named in ({"tree": "chain:3"}, {"verifier": "block"}, {"law": "iid"})
    ),
    ({"tree": "bush:3"}, "bush.*chain.*kary.*list"),
    ({"tree": 5}, "Unknown tree 5: choose chain:D"),
    ({"tree": foretoken.tree("chain:3")}, "Unknown tree"),
    ({"tree": "kary:2"}, "KxD"),
    ({"tree": "chain:-1"}, "positive"),
    ({"tree": "chain:²"}, "positive"),
    ({"tree": "budget:0"}, "positive integers"),
    ({"tree": "list:/nowhere/none.json"}, "none.json"),
    ({"law": "gumbel"}, "gumbel.*iid"),
    ({"law": 5}, "Unknown law 5"),
    ({"method": "best"}, "Unknown method best: choose one of fixed, auto"),
    ({"method": None}, "Unknown method None: choose one of fixed, auto"),
    ({"method": ["auto"]}, r"Unknown method \['auto'\]"),
    ({"verifier": "typical"}, "typical.*exact-match.*rrsw"),
    ({"verifier": ["block"]}, r"Unknown verifier \['block'\]"),
    ({"max_batch": 0}, "max_batch"),
    ({"max_batch": None}, "max_batch is None"),
    ({"tokenizer": 5}, "The tokenizer is 5: give a tokenizer"),
    ({"drafter_tokenizer": object()}, "The tokenizer is <object"),
    ({"profile": 5}, "profile is 5: give the path of a file"),
    ({"suffix_store": b"x"}, "suffix_store is b'x': give the path"),
    ({"dtype": "float3"}, "float3"),
    ({"device": ["cpu"]}, r"Device \['cpu'\] cannot be used"),
    ({"device": ""}, "Device '' cannot be used"),
    ({"drafter": "/nowhere"}, "nowhere"),
    # Rules and laws that do not fit each other, or what is drafted.
    ({"tree": "kary:2x2", "verifier": "standard"}, "standard.*iid.*2 draws"),
    ({"verifier": "rrs", "law": "without-replacement", "tree": "kary:2x2"}, "rrs.*without_replacement"),
    ({"tree": "budget:8", "verifier": "block"}, "does not branch"),
    ({"tree": "dynamic:8", "verifier": "rrsw"}, "needs verifier exact-match with law opaque"),
    ({"drafter": "ngram", "verifier": "rrsw"}, "opaque.*exact-match"),
    ({"drafter": "ngram", "tree": "budget:8", "verifier": "exact-match"}, "ngram has no probabilities"),
    ({"drafter": "suffix", "tree": "chain:4@0.5"}, "Drafter suffix has no probabilities"),
    # Randomised drafting.
    ({"draft_probability": "x"}, "The draft probability is 'x': it must be a number"),
    ({"draft_probability": -0.1}, r"must be in \[0, 1\]"),
    ({**COINS, "drafter": "ngram"}, NO_Q),
    ({**COINS, "drafter": None}, NO_Q),
    ({**COINS, "law": "without_replacement"}, "makes i.i.d. draws"),
    *(({**COINS, "verifier": rule, "tree": "kary:2x2"}, "not lossless for law iid") for rule in ("hub", "randomised")),
    # Draft heads.
    ({"drafter": "eagle", "vocab": "tli"}, "leave vocab"),
    ({"drafter": "eagle", "tree": "product:20"}, "needs parallel ones"),
    ({**COINS, "drafter": "eagle", "tree": "chain:3"}, "beside the target, and a head reads its hidden states"),
    (
        {"drafter": "medusa", "tree": "product:20", "verifier": "rrsw"},
        "which needs verifier exact-match with law opaque",
    ),
    ({"drafter": "medusa", "tree": "kary:2x2", "verifier": "standard"}, "not lossless for law"),
    # The target's own weights.
    ({"drafter": "self", "compile": "off"}, "a target that our CPU kernel runs.*runs by modules: choose drafter ngram"),
    (
        {"drafter": "self", "vocab": "tli"},
        "vocab tli is for a drafter model with a .*, and drafter self has its target's",
    ),
    ({"drafter": "self", "tree": "product:20"}, "product:20 is for draft heads"),
    ({"drafter": "self:q9"}, "Drafter self:q9 names no known kind of blocks: choose self:q8_0 or self:"),
    ({"drafter": "self:"}, "Drafter self: names no known kind of blocks"),
    ({**COINS, "drafter": "self", "tree": "chain:3"}, "drafter self works in its cache: name a model"),
    # Two in a row.
    ({"drafter": "suffix+"}, r"suffix\+ names no model after its lookup: say suffix\+self or suffix\+FOLDER"),
    ({"drafter": "suffix+ngram"}, "names no model after its lookup"),
    ({"drafter": "ngram+none"}, r"say ngram\+self"),
    ({"drafter": "suffix+auto"}, "names no model after its lookup"),
    ({"drafter": "suffix+self:q9"}, "names no known kind of blocks"),
    ({"drafter": "suffix+nowhere"}, "There is no model nowhere here"),
    ({**COINS, "drafter": "suffix+drafter"}, "works beside the target, which none after suffix"),
    ({"drafter": "suffix+drafter", "tree": "kary:2x2", "verifier": "standard"}, "standard is not lossless"),
]


@pytest.mark.parametrize(("options", "says"), LOADED, ids=[" ".join(options) for options, _ in LOADED])
def test_what_an_engine_is_not_made_of(folders: dict[str, str], options: Options, says: str) -> None:
    drafter: Any = options.get("drafter", "drafter")
    first, plus, name = (drafter or "").rpartition("+")
    named = f"{first}{plus}{folders.get(name, name)}" if drafter else drafter
    with pytest.raises(ForetokenError, match=says):
        foretoken.load(folders["target"], **{"device": "cpu", **options, "drafter": named})


VOCABULARIES: list[tuple[Options, str]] = [
    ({"vocab": "foo"}, "Unknown vocab foo"),
    ({"vocab": "foo", "drafter": "ngram"}, "Unknown vocab foo"),
    ({"vocab": "tli", "drafter": "ngram"}, "vocab tli is for a drafter model.*drafter ngram has none: leave vocab"),
    ({"vocab": "tli", "drafter": None}, "drafter none has none: leave vocab out"),
    ({"vocab": "slrs", "law": "iid"}, "vocab slrs draws in a way of its own, to which law iid means nothing"),
    ({"vocab": "slem", "verifier": "block"}, "that vocab slem does not give: choose exact-match"),
    ({"vocab": None, "tokenizer": None}, "has 263 tokens and target .* 300, which is not one vocabulary"),
]


@pytest.mark.parametrize(("options", "says"), VOCABULARIES)
def test_what_does_not_go_with_a_vocabulary(options: Options, says: str) -> None:
    drafter, tokenizer = zoo.byte_only(), zoo.byte_only()
    models = {"drafter": tiny.llama(1, vocab=263), "tokenizer": tokenizer, "drafter_tokenizer": drafter}
    with pytest.raises(ForetokenError, match=says):
        foretoken.load(tiny.llama(0, vocab=300), device="cpu", **{**models, **options})


@pytest.mark.parametrize(
    ("call", "arguments", "says"),
    [
        (foretoken.tree, (5,), "Unknown tree"),
        (foretoken.tree, (None,), "Unknown tree"),
        (foretoken.verifier, (None,), "Unknown verifier None"),
        (foretoken.law, (5,), "Unknown law 5"),
        (foretoken.law, ("iid", "2"), "k is '2': it must be a whole number"),
        (foretoken.law, ("iid", 2.0), "k is 2.0: it must be a whole number"),
    ],
)
def test_names_of_trees_rules_and_laws(call: Callable[..., object], arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(ForetokenError, match=says):
        call(*arguments)


FUNCTIONS = "processors must be a list of functions"
CALLED: list[tuple[Options, str]] = [
    ({"foo": 1}, r"^Unknown option foo: choose one of .*temperature.*\.$"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": 1.5}, "^max_new_tokens is 1.5: it must be a whole number"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**32}, "seed"),
    ({"seed": 1.5}, "^seed is 1.5: it must be a whole number"),
    ({"top_k": 1.5}, "^top_k is 1.5: it must be a whole number"),
    ({"temperature": "hot"}, "^temperature is 'hot': it must be a number"),
    ({"temperature": 10**400}, "must be a finite number"),
    ({"presence_penalty": 10**31}, "presence_penalty is 1000"),
    ({"logit_bias": {999: 1.0}}, "logit_bias has token id 999"),
    ({"logit_bias": {1.5: 1}}, "^A token of logit_bias is 1.5: it must be a whole number"),
    ({"logit_bias": {1: "a"}}, "^logit_bias of token 1 is 'a'"),
    ({"logit_bias": [1]}, "^logit_bias is a list"),
    ({"stop": ""}, "stop string is empty"),
    ({"stop": ["a", ""]}, "stop string is empty"),
    ({"stop": b""}, "stop is b''"),
    ({"stop": 5}, "^stop is 5: give a text"),
    ({"stop": ["a", None]}, "^stop is "),
    ({"observer": 5}, "observer is 5: give a function"),
    ({"grammar": "[ab]+"}, "The grammar is a str: give foretoken.Grammar.regex"),
    ({"grammar": foretoken.Grammar}, "The grammar is a type"),
    *(({"processors": given}, FUNCTIONS) for given in (len, None, [5])),
]


@pytest.mark.parametrize(("options", "says"), CALLED, ids=[" ".join(options) for options, _ in CALLED])
def test_what_no_call_takes(engine: foretoken.Engine, options: Options, says: str) -> None:
    """A stream is refused when it is asked for, and not at its first chunk."""
    for call in (engine.generate, engine.stream):
        with pytest.raises(ForetokenError, match=says):
            call("x", **options)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "The prompt is of type int: give a text"),
        (None, "The prompt is of type NoneType: give a text"),
        ({"input_ids": [1]}, "The prompt is of type dict: give a text"),
        (b"abc", "^The prompt is bytes, which is no text"),
        (["x", b"abc"], "^Prompt 2 is bytes"),
        *((prompt, "The prompt is neither") for prompt in ([1.5], [1.0, 2.0], [5, "a"])),
        *((prompt, "Prompt 2 is neither") for prompt in (["a", 5], [[1], [2.0]])),
        ("a\ud800b", r"^The prompt is not valid Unicode: character 2 is the lone surrogate U\+D800"),
        (["x", "\udcff"], r"^Prompt 2 is not valid Unicode: character 1"),
        ("", "empty"),
        ([[1], []], "Prompt 2 is empty"),
        ([1] * 256, "context"),
        ([1, 999], "999"),
    ],
)
def test_what_is_no_prompt(engine: foretoken.Engine, prompt: Any, says: str) -> None:
    with pytest.raises(ForetokenError, match=says):
        engine.generate(prompt)
