"""`foretoken demo`: the answer of a real chat model, and how much faster it came."""

import sys
from typing import Any

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
    asked: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_new_tokens": 512}
    if not small:
        try:
            asked = {"prompt": QUESTION, "target": str(bring(named(MODEL))), "drafter": OWN, "chat": True}
            asked |= {"temperature": 0.0, "max_new_tokens": 400}
            print(f"User: {QUESTION}\n", file=sys.stderr)
        except ForetokenError as error:
            print(f"foretoken: {error}\nforetoken: the small models that come with it run instead.", file=sys.stderr)
    generate(**asked, dtype="bfloat16", compare=True)
