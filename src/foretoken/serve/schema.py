"""What clients may send, field by field; a request with any other field is refused.

The table in docs/serving.md is made from the descriptions of the fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
MOST_STOPS = 16  # stop strings; each is looked for at every token
MOST_STOP = 1000  # characters of one stop string
MOST_BIASES = 1024  # tokens in logit_bias, whose scores are changed at every step
MOST_TOP = 20  # most probable tokens that are reported at each position
MOST_TOOLS = 128  # functions


def optional(description: str | None = None, **more: Any) -> Any:
    """Return a field that may be left out, or null. description: what docs/serving.md says. more: as for `Field`."""
    return Field(default=None, description=description, **more)


class Strict(BaseModel):
    """A JSON object for which fields of another name, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = optional("A last chunk with `usage`, `metrics` and `seed`.")
    continuous_usage_stats: bool | None = optional(
        "vLLM's: each chunk has the `usage` so far, of all choices together."
    )
    include_obfuscation: Literal[False] | None = optional("OpenAI's: only `false`, which changes nothing.")
    include_steps: bool | None = optional(
        "Ours: each chunk tells the step's tokens with their origin, and the token tree, as `step`."
    )


class Named(Strict):
    model: str | None = optional("The model's name; by default the one that is served.")


class JsonSchema(Strict):
    name: str | None = optional("A name for the schema; it changes nothing.")
    description: str | None = optional("A description for the schema; it changes nothing.")
    strict: bool | None = optional("The schema is enforced in any case.")
    of: dict[str, Any] = Field(alias="schema", description="The JSON schema.")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = optional("The schema, with the type `json_schema`.")


class StructuredOutputs(Strict):
    of: dict[str, Any] | str | None = optional("A JSON schema.", alias="json")
    json_object: Literal[True] | None = optional("Any JSON object.")
    regex: str | None = optional("A regular expression for the whole text.")
    choice: list[str] | None = optional("One of these texts.", min_length=1, max_length=1000)
    grammar: str | None = optional("A Lark grammar.")


Stop = Annotated[str, Field(max_length=MOST_STOP)]
Stops = Annotated[list[Annotated[Stop, Field(min_length=1)]], Field(max_length=MOST_STOPS)]
Depth = Annotated[int, Field(ge=1, le=64)]


class Sampled(Named):
    """The fields that requests for chat completions and for completions have in common."""

    stream: bool | None = optional("Send the text as it grows, by server-sent events.")
    stream_options: StreamOptions | None = optional("What a stream sends besides; only with `stream`.")
    n: int | None = optional("Texts for each prompt; default 1.", ge=1)
    max_tokens: int | None = optional("Most tokens of a text; by default what the context leaves.", ge=1)
    stop: Stop | Stops | None = optional(f"Up to {MOST_STOPS} strings; the text ends before the first that comes.")
    seed: int | None = optional(
        "The seed of choice 0; choice i has seed + i, modulo 2^32. By default a new one, which the answer names.",
        ge=-(2**63),
        lt=2**64,
    )
    temperature: float | None = optional("0 is greedy; default 1.")
    top_p: float | None = optional("Keep the likeliest tokens with this mass; default 1.")
    top_k: int | None = optional("Keep the k likeliest tokens; default 0, all; so is -1.")
    min_p: float | None = optional("Drop tokens below this share of the best one's probability; default 0.")
    repetition_penalty: float | None = optional("Divide scores of tokens seen before.")
    frequency_penalty: float | None = optional("Subtract this for every earlier occurrence.")
    presence_penalty: float | None = optional("Subtract this once from tokens generated before.")
    logit_bias: dict[str, float] | None = optional("Token id -> what is added to its score.", max_length=MOST_BIASES)
    ignore_eos: bool | None = optional("Go on after the tokens that end a text; for measurements.")
    speculation: Literal["off"] | Depth | None = optional(
        'Ours: "off" decodes plainly, a number is the largest depth of the token trees.'
    )
    response_format: ResponseFormat | None = optional(
        "JSON, as `json_object` or by a `json_schema`; every token keeps to it."
    )
    structured_outputs: StructuredOutputs | None = optional(
        "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` (in Lark's form)."
    )
    user: str | None = optional("An identifier of yours; it changes nothing.")


class Function(Strict):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = optional("JSON schema of its arguments, an object.")
    strict: bool | None = optional("Whether calls are held to the schema at every token.")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[
    list[Tool] | None, Field(min_length=1, max_length=MOST_TOOLS, description="Functions that the answer may call.")
]


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = optional("Anthropic's; it changes nothing.")


class Sent(Strict):
    """An object that clients send back as they got it: fields that are null are left out, whatever their name.

    Fields that a client adds by itself, as the `openai` package's `parse` does, are accepted and not used.
    """

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, sent: Any) -> Any:
        """Return `sent` without its fields that are null, where it is an object; else as it is."""
        return {key: value for key, value in sent.items() if value is not None} if isinstance(sent, Mapping) else sent


class CalledFunction(Sent):
    name: str
    arguments: str = Field(description="The JSON text of an object.")
    parsed_arguments: Any = optional(exclude=True)


class ToolCall(Sent):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = optional(exclude=True)


class ChatMessage(Sent):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = optional("The calls of an earlier answer.")
    tool_call_id: str | None = optional("The call whose result this is.")
    reasoning_content: str | None = optional("Passed to the chat template.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = optional(exclude=True)
    parsed: Any = optional(exclude=True)


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(description="The conversation; see [below](#messages-and-tools).")
    max_completion_tokens: int | None = optional("The same as `max_tokens`.", ge=1)
    logprobs: bool | None = optional("Report the log probability of each token, of the target at temperature 1.")
    top_logprobs: int | None = optional(
        "Report those of so many of the likeliest tokens too; needs `logprobs`.", ge=0, le=MOST_TOP
    )
    tools: Tools = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = optional(
        "Whether the answer calls functions, or the one that it must call; default `auto`."
    )
    parallel_tool_calls: bool | None = optional("Whether the answer may call several functions; default true.")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = optional(
        'Only `["text"]`, which changes nothing.'
    )
    service_tier: Literal["auto", "default"] | None = optional("Only `auto` and `default`, which change nothing.")
    store: Literal[False] | None = optional("Only `false`: no answer is stored.")
    metadata: dict[str, str] | None = optional("Texts of yours; they change nothing.")
    safety_identifier: str | None = optional("An identifier of yours; it changes nothing.")
    prompt_cache_key: str | None = optional("An identifier of yours; it changes nothing.")


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="A text, token ids, or a list of either.")
    max_tokens: int | None = optional(
        f"Most tokens of a text; default {COMPLETION_TOKENS}. 0 is for `echo` with `logprobs`.", ge=0
    )
    logprobs: int | None = optional(
        "Report log probabilities, and those of so many of the likeliest tokens.", ge=0, le=MOST_TOP
    )
    echo: bool | None = optional("Put the prompt before the text, with `logprobs` also its own ones.")
    best_of: int | None = optional("Only the value of `n`, which changes nothing.")


class TokenizeRequest(Named):
    prompt: str | None = optional("A text.")
    messages: list[ChatMessage] | None = optional("Or a conversation.")
    tools: Tools = None


class DetokenizeRequest(Named):
    tokens: list[int] = Field(description="Token ids.")
