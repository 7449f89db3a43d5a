"""The known models themselves, fetched once: their texts are likely under their weights, and their tokens are right.

A wrong order of rows, a norm that is off by one or a wrong rotary base gives perplexities in the thousands.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken

TEXT = (
    "The Industrial Revolution was a period of global transition of the human economy towards more widespread, "
    "efficient and stable manufacturing processes. It began in Great Britain and spread to continental Europe and the "
    "United States. The transition included going from hand production methods to machines, new chemical manufacturing "
    "and iron production processes, the increasing use of water power and steam power, the development of machine "
    "tools, and the rise of the mechanised factory system."
)
MIXED = "def f(x):\n    return x**2  # 12345\n\n\té 😀 <b>it's</b> I'LL 東京\r\n"
HELLO = {  # ids of "Hello world" as the models' publishers' tokenizers give them
    "smollm2-135m-instruct": [19556, 905],
    "qwen2.5-coder-1.5b-instruct": [9707, 1879],
    "gemma-3-270m": [2, 9259, 1902],
}
ENDS = {
    "smollm2-135m-instruct": {"<|im_end|>", "<|endoftext|>"},
    "qwen2.5-coder-1.5b-instruct": {"<|im_end|>", "<|endoftext|>"},
    "gemma-3-270m": {"<eos>", "<end_of_turn>"},
}

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", HELLO)]


def test_text_is_likely(name: str):
    folder = foretoken.fetch(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        perplexity = model(ids, labels=ids).loss.exp().item()
    assert perplexity < 30


def test_tokens(name: str):
    folder = foretoken.fetch(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Hello world").input_ids == HELLO[name]
    assert tokenizer.decode(tokenizer(MIXED).input_ids, skip_special_tokens=True) == MIXED
    assert [token for token in tokenizer.tokenize("x 2024") if token.isdigit()] == ["2", "0", "2", "4"]
    config = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert set(tokenizer.convert_ids_to_tokens(config.eos_token_id)) == ENDS[name]
    if tokenizer.chat_template is None:
        assert name == "gemma-3-270m"  # the base model has none
        return
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids.count(start), ids.count(end)) == (3, 2)  # system, user, assistant
