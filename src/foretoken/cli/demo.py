"""`foretoken demo`: the answer of a real chat model, and how much faster it came."""

import sys

from foretoken.catalogue.known import named
from foretoken.cli.command import command
from foretoken.cli.fetch import bring
from foretoken.cli.generate import generate
from foretoken.core.errors import ForetokenError
from foretoken.recipe import OWN

MODEL = "smollm2-135m-instruct"
QUESTION = (
    "Write a Python function that counts how often each word occurs in a text, then explain line by line how it works."
)


@command
def demo(*, small: bool = False) -> None:
    """Answer a question with SmolLM2-135M-Instruct, drafted by itself in 4 bits, beside plain decoding in the same run.

    The model is brought by `foretoken fetch` at the first run, 93 MB. Where that fails, a small model that comes with
    foretoken continues a program instead.

    small: Use the small models that come with foretoken: nothing is downloaded.
    """
    folder = None
    if not small:
        try:
            folder = bring(named(MODEL))
        except ForetokenError as error:
            print(f"foretoken: {error}\nforetoken: the small models that come with it run instead.", file=sys.stderr)
    if folder is None:
        generate(dtype="bfloat16", temperature=0.8, seed=4, max_new_tokens=512, compare=True)
        return
    print(f"User: {QUESTION}\n", file=sys.stderr)
    answer = {"prompt": QUESTION, "target": str(folder), "drafter": OWN, "chat": True}
    generate(**answer, dtype="bfloat16", temperature=0.0, max_new_tokens=400, compare=True)
