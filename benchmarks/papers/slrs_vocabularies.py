"""Timor et al. 2025, appendices E and F (Tables 8 to 11): how vocabularies overlap, and which texts survive them."""

from dataclasses import replace
from itertools import permutations

from benchmarks.by_kind import read_kinds
from benchmarks.papers.run import Run
from benchmarks.places import CHAT
from foretoken.catalogue.known import known_models
from foretoken.models.load import load_tokenizer
from foretoken.vocab.overlap import injective
from foretoken.vocab.translation import Translation
from foretoken.vocab.vocabulary import vocabulary

# Citations: Tables 8, 9 and 10, of other models.
SIZES = "256,000 (Gemma-2-9b), 151,646 (Qwen2-0.5B-Instruct), 49,152 (tiny_starcoder_py), 32,000 (vicuna-68m)"
COMMON = ".12 (Gemma-2-9b, vicuna-68m) to .85 (Llama-3.1-70B, Qwen2-0.5B-Instruct); in prompts .77 to 1.0"


def slrs_vocabularies(run: Run) -> None:
    """Every ordered pair of vocabularies: those of the models named, or of ours and of all that were fetched."""
    folders = dict(run.vocabularies)
    if not run.named:
        known = [form for model in known_models().values() for form in (model, replace(model, packed=True))]
        folders |= {model.name: str(model.folder) for model in known if model.fetched}
    tokenizers = {name: load_tokenizer(folder) for name, folder in folders.items()}
    of_kind: dict[str, list[str]] = {}
    for kind, messages in read_kinds(CHAT):
        of_kind.setdefault(str(kind), []).append(messages if isinstance(messages, str) else messages[-1]["content"])
    texts = {kind: "\n".join(prompts) for kind, prompts in of_kind.items()}
    own = {name: vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}
    sizes = run.report.table("Table 8: tokens, special ones included", ["vocabulary", "tokens"])
    survive = run.report.table("Table 11: stretches of 100 characters that survive", ["vocabulary", *texts], 3)
    used: dict[str, list[set[int]]] = {}  # the different tokens of each text
    for name, tokenizer in tokenizers.items():
        run.progress(f"reading the prompts with {name}")
        sizes.add(name, len(own[name]))
        survive.add(name, *(injective(tokenizer, text) for text in texts.values()))
        used[name] = [set(own[name].encode(text.encode())) for text in texts.values()]
    columns = ["target", "drafter", "common", "of the target's", *(f"in {kind} prompts" for kind in texts)]
    shares = run.report.table("Tables 9 and 10: tokens in common", columns, 3)
    for target, drafter in permutations(tokenizers, 2):
        run.progress(f"comparing {target} with {drafter}")
        common = Translation(own[target], own[drafter]).pairs.keys()
        in_texts = (len(tokens & common) / len(tokens) for tokens in used[target])
        shares.add(target, drafter, len(common), len(common) / len(own[target]), *in_texts)
    sizes.notes.append(f"Paper, other models: {SIZES}.")
    shares.notes.append(
        f"Paper, other pairs: {COMMON}. Shares in prompts are of the different tokens that occur. Tokens are compared "
        "by their bytes."
    )
    survive.notes.append("Paper: a tokenizer is injective if all survive, as GPT-2's and Qwen2's; vicuna-68m's is not.")
