"""Decode several prompts side by side: prompt i has seed + i, and gets the text that it would get alone.

Usage: python examples/many_prompts.py
"""

import foretoken

engine = foretoken.load("models/target", drafter="models/drafter", tree="kary:2x3", max_batch=4)
prompts = ["def read(path):\n", "import os\n", "class Stack:\n", "for line in", "x = [", "# Returns"]
options = {"max_new_tokens": 32, "temperature": 0.8}

results = engine.generate(prompts, seed=1, **options)
for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
    alone = engine.generate(prompt, seed=1 + i, **options)
    print(f"{prompt!r} -> {result.text[:40]!r}")
    print(f"   {result.stats.block_efficiency:.2f} tokens per step; the same alone: {alone.text == result.text}")
