"""Speculative decoding inside transformers' own `generate`, without a second model.

Usage: python examples/inside_transformers.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken

name = sys.argv[1] if len(sys.argv) > 1 else "models/target"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
inputs = tokenizer("x = [1, 2, 3, 4]\ny = [1, 2, 3, 4]\nz =", return_tensors="pt")

drafted = model.generate(
    **inputs, max_new_tokens=24, do_sample=False, custom_generate=foretoken.custom_generate, draft_model="ngram"
)
plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(drafted[0]))
print(f"the same text as generate's own: {drafted.tolist() == plain.tolist()}")
