"""Options that the commands which write text share: how tokens are drawn, and where the text ends."""

from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 is the model's own distribution.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens with this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divide scores of tokens seen before.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtract this for every earlier occurrence.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract this once from tokens generated before.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
System = Annotated[str | None, typer.Option(help="System message before the user's; with generate it implies --chat.")]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts",
        help="Tint the text: drafted and accepted tokens, tokens that correct a rejected draft, and bonus tokens. "
        "Colours need a terminal, or FORCE_COLOR=1; NO_COLOR is respected.",
    ),
]
