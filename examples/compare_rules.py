"""How often each rule accepts one of k independent draft tokens, computed exactly for a target's and a drafter's rows.

Usage: python examples/compare_rules.py
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken

tokenizer = AutoTokenizer.from_pretrained("models/target")
ids = tokenizer("import os\n\ndef walk(folder):\n    for name in os.listdir(folder):\n", return_tensors="pt").input_ids
with torch.inference_mode():
    p, q = (
        AutoModelForCausalLM.from_pretrained(f"models/{name}", dtype=torch.float32)(ids).logits[0].double().softmax(-1)
        for name in ("target", "drafter")
    )

print(f"{'rule':10} " + " ".join(f"{k:>7} draws" for k in (1, 2, 4)))
for rule in ("standard", "rrs", "transport"):
    laws = [foretoken.law("iid", k) for k in (1, 2, 4)]
    accepts = [rule != "standard" or law.k == 1 for law in laws]
    shares = [
        f"{float(foretoken.acceptance(rule, law, p, q).mean()):13.4f}" if fits else f"{'-':>13}"
        for law, fits in zip(laws, accepts, strict=True)
    ]
    print(f"{rule:10} " + "".join(shares))
best = [float(foretoken.alpha_star(foretoken.law("iid", k), p, q).mean()) for k in (1, 2, 4)]
print(f"{'optimum':10} " + "".join(f"{share:13.4f}" for share in best))
