"""`custom_generate` of transformers: its text, its settings, and what it refuses."""

import warnings

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GPT2Config,
    GPT2LMHeadModel,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import foretoken
import models_zoo
import tiny
from foretoken.models.hf_model import cache_name

GREEDY = {"do_sample": False}
NGRAM = {"custom_generate": foretoken.custom_generate, "draft_model": "ngram"}


def drafted(models) -> dict:
    return {"custom_generate": foretoken.custom_generate, "draft_model": models[1], "tree": "kary:2x2"}


@pytest.fixture
def pair():
    """Two left-padded prompts of different lengths."""
    tok = tiny.tokenizer()
    tok.pad_token, tok.padding_side = tok.eos_token, "left"
    return tok(["def f(x):", "a"], return_tensors="pt", padding=True)


@pytest.mark.parametrize("do_sample", [False, True])
def test_it_is_an_entry_point_of_transformers(models, do_sample):
    target, inputs = models[0], tiny.tokenizer()("def f(x):", return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": do_sample, "temperature": 0.6 if do_sample else None}
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(target.generate(**inputs, **options, **drafted(models)))
    assert found[0].shape == (1, inputs["input_ids"].shape[1] + 24)
    assert torch.equal(*found)
    if not do_sample:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(found[0], target.generate(**inputs, **options))


def test_left_padded_prompts_in_a_batch_and_stopping_criteria(models, pair):
    target, options = models[0], {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(**pair, **options)
    assert torch.equal(target.generate(**pair, **options, **NGRAM), expected)
    stop = StoppingCriteriaList([lambda ids, scores: (ids[:, -1] == expected[0, -4]) | (ids[:, -1] == expected[1, -6])])
    own = StoppingCriteriaList([lambda ids, _: torch.tensor([ids.shape[1] >= (15, 18)[r] for r in range(len(ids))])])
    for options["stopping_criteria"] in (stop, own):
        assert torch.equal(target.generate(**pair, **options, **NGRAM), target.generate(**pair, **options))


@pytest.mark.filterwarnings("ignore:You set different")
def test_criteria_of_its_own_kinds_take_the_place_of_generates(models):
    """transformers leaves out its own criterion of a class where the caller gives one."""
    target, ids = models[0], tiny.tokenizer()("def f(x):", return_tensors="pt")["input_ids"]
    ends = [int(target.generate(ids, max_new_tokens=9, **GREEDY)[0, -n]) for n in (6, 3)]
    for criterion in (EosTokenCriteria(ends[1]), MaxLengthCriteria(ids.shape[1] + 20)):
        options = {"max_new_tokens": 12, "eos_token_id": ends[0], "stopping_criteria": [criterion], **GREEDY}
        expected = target.generate(ids, **options)
        for drafts in ({**NGRAM, "draft_model": None}, NGRAM, drafted(models)):
            assert torch.equal(target.generate(ids, **options, **drafts), expected), criterion


def test_without_an_end_of_text_token_rows_go_on_until_all_have_stopped(models, pair):
    """transformers pads stopped rows only where there is such a token."""
    target, options = models[0], {"max_new_tokens": 20, "eos_token_id": None, **GREEDY}
    plain = target.generate(**pair, **options)
    early, late = (int(plain[row, -place]) for row, place in ((0, 18), (1, 9)))
    options["stopping_criteria"] = [lambda ids, _: torch.stack([ids[0, -1] == early, ids[1, -1] == late])]
    expected = target.generate(**pair, **options)
    assert expected.shape[1] < plain.shape[1]
    for drafts in ({**NGRAM, "draft_model": None}, NGRAM, drafted(models)):
        assert torch.equal(target.generate(**pair, **options, **drafts), expected)


def test_stop_strings_are_taken_as_a_criterion(models):
    """As `stop_strings=` they never reach it: transformers looks for a tokenizer that it has thrown away."""
    target, tok = models[0], tiny.tokenizer()
    inputs = tok("def f(x):", return_tensors="pt")
    settings = {"max_new_tokens": 30, "do_sample": False}
    full = tok.decode(target.generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :])
    stop = next(full[i : i + 2] for i in range(8, len(full)) if "\ufffd" not in full[i : i + 2])
    expected = target.generate(**inputs, **settings, stop_strings=[stop], tokenizer=tok)
    criteria = [StopStringCriteria(tok, [stop])]
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 30
    assert torch.equal(target.generate(**inputs, **settings, stopping_criteria=criteria, **NGRAM), expected)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):  # the day it reaches us, the docs can say so
        target.generate(**inputs, **settings, stop_strings=[stop], tokenizer=tok, **NGRAM)


def test_the_calls_own_settings_are_obeyed(models, pair):
    """Each against transformers."""
    target = models[0]
    plain = target.generate(**pair, max_new_tokens=20, do_sample=False)
    first_end = int(plain[1, pair["input_ids"].shape[1] + 1])
    settings = [
        {"prefix_allowed_tokens_fn": lambda row, ids: [10, 11] if row == 0 else [20, 21, 22]},
        {"eos_token_id": first_end},
        {"eos_token_id": first_end, "min_new_tokens": 6},
        {"repetition_penalty": 1.7},
        {"do_sample": True, "top_k": 1},
        {"no_repeat_ngram_size": 2},
    ]
    for setting in settings:
        options = {"max_new_tokens": 20, "do_sample": False, **setting}
        expected = target.generate(**pair, **options)
        assert torch.equal(target.generate(**pair, **options, **drafted(models)), expected), setting


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.filterwarnings("error")
def test_allowed_tokens_are_not_asked_for_after_the_end(do_sample):
    """Nothing follows an answer in a trie, which transformers refuses; the drafts go beyond the end."""
    target, ids, answers = tiny.llama(0), torch.tensor([[5, 6, 7]]), [[8, 9, 0], [8, 10, 9, 0], [8, 9, 10, 11, 0]]

    def allowed(row: int, so_far: torch.Tensor) -> list[int]:
        new = so_far[3:].tolist()
        return sorted({answer[len(new)] for answer in answers if answer[: len(new)] == new and len(answer) > len(new)})

    for seed in range(4):
        torch.manual_seed(seed)
        options = {"max_new_tokens": 12, "do_sample": do_sample, "prefix_allowed_tokens_fn": allowed}
        drafts = {"custom_generate": foretoken.custom_generate, "draft_model": target, "tree": "chain:5"}
        text = target.generate(ids, **options, **drafts)
        assert text[0, 3:].tolist() in answers
        if not do_sample:
            assert torch.equal(text, target.generate(ids, **options))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"output_scores": True, "return_dict_in_generate": True},
            "Foretoken returns ids only: leave output_scores off",
        ),
        ({"num_return_sequences": 2}, "Foretoken decodes one sequence per prompt"),
        ({"prompt_lookup_num_tokens": 5}, "give draft_model='ngram'"),
        ({"force_words_ids": [[5, 6]]}, "does not decode by force_words_ids"),
    ],
)
def test_what_it_cannot_give_is_refused(models, option, says):
    with pytest.raises(foretoken.ForetokenError, match=says):
        models[0].generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=True, **NGRAM, **option)


def test_prompts_that_are_no_token_ids_are_refused(models, pair):
    target, asked = models[0], {"max_new_tokens": 4, "do_sample": False, **NGRAM}
    embeds = target.get_input_embeddings()(pair["input_ids"])
    with pytest.raises(foretoken.ForetokenError, match="leave inputs_embeds out"):
        target.generate(**pair, inputs_embeds=embeds, **asked)
    pair["attention_mask"][1] = 0
    with pytest.raises(foretoken.ForetokenError, match="Row 1 of input_ids has no token"):
        target.generate(**pair, **asked)


@pytest.mark.parametrize("name", ["token_type_ids", "position_ids", cache_name(GPT2LMHeadModel)])
def test_what_else_shapes_the_logits_is_never_left_out_in_silence(name):
    """Each of them gives another text in transformers."""
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, eos_token_id=0, initializer_range=0.3)
    torch.manual_seed(0)
    model, ids, options = GPT2LMHeadModel(config).eval(), torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6}
    earlier = model(torch.tensor([[9]]))[cache_name(GPT2LMHeadModel)]
    given = {"token_type_ids": ids, "position_ids": torch.tensor([[0, 5, 9]])}.get(name, earlier)
    with pytest.raises(foretoken.ForetokenError, match=f"generate was given {name}: leave that out"):
        model.generate(ids, **options, **{name: given}, **NGRAM)


def test_position_ids_that_count_the_tokens_are_no_change(models, pair):
    options = {"position_ids": (pair["attention_mask"].cumsum(-1) - 1).clamp(min=0), "max_new_tokens": 6, **GREEDY}
    expected = models[0].generate(**pair, **options)
    assert torch.equal(models[0].generate(**pair, **options, **NGRAM), expected)


def test_images_are_never_left_out_in_silence():
    model = models_zoo.tiny_with_images()
    text = {"input_ids": torch.tensor([[1, 2, *[100] * 4, 3]]), "max_new_tokens": 4}
    image = {"pixel_values": torch.ones(1, 3, 64, 64), "image_sizes": torch.tensor([[64, 64]])}
    with pytest.raises(foretoken.ForetokenError, match="leave images and sound out"):
        model.generate(**text, **image, do_sample=False, **NGRAM)
    ids = model.generate(**text, do_sample=False)
    assert torch.equal(model.generate(**text, do_sample=False, **NGRAM), ids)


class Prefix:
    """Stands for a peft model of prefix tuning, which sets its own method on the model while that generates."""

    def __init__(self, model) -> None:
        self.inner = model.prepare_inputs_for_generation

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_tuned_prefixes_are_never_left_out_in_silence():
    model, ids = tiny.llama(0), torch.tensor([[1, 2]])
    prefix = Prefix(model)
    model.prepare_inputs_for_generation = prefix.prepare_inputs_for_generation
    with pytest.raises(foretoken.ForetokenError, match="prepared by another object, as with peft's"):
        model.generate(ids, max_new_tokens=4, **NGRAM)
    model.prepare_inputs_for_generation = prefix.inner  # as peft leaves it
    assert model.generate(ids, max_new_tokens=4, do_sample=False, **NGRAM).shape[1] > 2


@pytest.mark.parametrize("drafter", ["self", "self:q8_0", "suffix+self"])
def test_the_targets_own_weights_are_for_what_is_loaded_by_its_folder(models, drafter):
    says = r"LlamaForCausalLM is a model object: load it by its folder .*drafter=\"self\"\), or choose drafter ngram"
    with pytest.raises(foretoken.ForetokenError, match=says):
        models[0].generate(torch.tensor([[1, 2]]), max_new_tokens=4, **{**NGRAM, "draft_model": drafter})


@pytest.mark.parametrize("draft_model", ["ngram", None])
def test_a_text_ends_where_no_further_position_can_be_used(draft_model):
    """GPT-2 has a table of positions; transformers' own loop fails behind it."""
    target = models_zoo.tiny("gpt2", n_positions=16, random_weights=True)
    options = {**GREEDY, "pad_token_id": 0, "custom_generate": foretoken.custom_generate, "draft_model": draft_model}
    prompts = torch.tensor([[0, 0, 5, 6, 7, 8, 5, 6, 7, 8], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    mask = (prompts > 0).long()
    with pytest.warns(UserWarning, match=r"^A text ends where the context of .* does, at 16 tokens\.$"):
        found = target.generate(prompts, attention_mask=mask, max_new_tokens=20, **options)
    assert found.shape == (2, 18)
    for ids, prompt in zip(found, ([5, 6, 7, 8] * 2, prompts[1].tolist()), strict=True):
        own = target.generate(torch.tensor([prompt]), max_new_tokens=16 - len(prompt), **GREEDY, pad_token_id=0)[0]
        assert ids[-len(own) :].tolist() == own.tolist() or ids[:16].tolist() == own.tolist()
    assert target.generate(prompts, attention_mask=mask, max_new_tokens=6, **options).shape == (2, 16)
    with pytest.raises(foretoken.ForetokenError, match=r"^Row 0 of input_ids has 16 tokens, and the context of .* is"):
        target.generate(torch.arange(1, 17)[None], max_new_tokens=1, **options)
