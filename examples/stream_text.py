"""Print a text as its tokens are accepted, then decode the same text plainly.

Usage: python examples/stream_text.py [TARGET [DRAFTER]]
"""

import sys

import foretoken

target = sys.argv[1] if len(sys.argv) > 1 else "models/target"
drafter = sys.argv[2] if len(sys.argv) > 2 else "models/drafter" if target == "models/target" else "auto"
prompt, options = "def count_words(text):\n", {"max_new_tokens": 64, "temperature": 0.0}

engine = foretoken.load(target, drafter=drafter)
print(prompt, end="")
for chunk in engine.stream(prompt, **options):
    print(chunk.text, end="", flush=True)

drafted = engine.generate(prompt, **options)
plain = foretoken.load(target).generate(prompt, **options)
print(f"\n\ntokens per step   {drafted.stats.block_efficiency:.2f}")
print(f"acceptance rate   {drafted.stats.acceptance_rate:.2f}")
print(f"tokens per second {drafted.stats.tokens_per_s:.0f}, plain {plain.stats.tokens_per_s:.0f}")
print(f"the same text     {drafted.token_ids == plain.token_ids}")
