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


class Strict(BaseModel):
    """A JSON object for which fields of another name, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: Annotated[bool | None, Field(description="A last chunk with `usage`, `metrics` and `seed`.")] = None
    include_steps: Annotated[
        bool | None,
        Field(description="Ours: each chunk tells the step's tokens with their origin, and the token tree, as `step`."),
    ] = None


class Named(Strict):
    model: Annotated[str | None, Field(description="The model's name; by default the one that is served.")] = None


class JsonSchema(Strict):
    name: Annotated[str | None, Field(description="A name for the schema; it changes nothing.")] = None
    description: Annotated[str | None, Field(description="A description for the schema; it changes nothing.")] = None
    strict: Annotated[bool | None, Field(description="The schema is enforced in any case.")] = None
    of: Annotated[dict[str, Any], Field(alias="schema", description="The JSON schema.")]


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, Field(description="The schema, with the type `json_schema`.")] = None


class StructuredOutputs(Strict):
    of: Annotated[dict[str, Any] | str | None, Field(alias="json", description="A JSON schema.")] = None
    json_object: Annotated[Literal[True] | None, Field(description="Any JSON object.")] = None
    regex: Annotated[str | None, Field(description="A regular expression for the whole text.")] = None
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=1000, description="One of these texts.")] = None
    grammar: Annotated[str | None, Field(description="A Lark grammar.")] = None


Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]
Depth = Annotated[int, Field(ge=1, le=64)]


class Sampled(Named):
    """The fields that requests for chat completions and for completions have in common."""

    stream: Annotated[bool | None, Field(description="Send the text as it grows, by server-sent events.")] = None
    stream_options: Annotated[
        StreamOptions | None, Field(description="What a stream sends besides; only with `stream`.")
    ] = None
    n: Annotated[int | None, Field(ge=1, description="Texts for each prompt; default 1.")] = None
    max_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description=f"Most tokens of a text; by default {COMPLETION_TOKENS} of a completion, and for a chat what "
            "the context leaves.",
        ),
    ] = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None,
        Field(description=f"Up to {MOST_STOPS} strings; the text ends before the first that comes."),
    ] = None
    seed: Annotated[
        int | None,
        Field(description="The seed of choice 0; choice i has seed + i. By default a new one, which the answer names."),
    ] = None
    temperature: Annotated[float | None, Field(description="0 is greedy; default 1.")] = None
    top_p: Annotated[float | None, Field(description="Keep the likeliest tokens with this mass; default 1.")] = None
    top_k: Annotated[int | None, Field(description="Keep the k likeliest tokens; default 0, all.")] = None
    min_p: Annotated[
        float | None, Field(description="Drop tokens below this share of the best one's probability; default 0.")
    ] = None
    repetition_penalty: Annotated[float | None, Field(description="Divide scores of tokens seen before.")] = None
    frequency_penalty: Annotated[float | None, Field(description="Subtract this for every earlier occurrence.")] = None
    presence_penalty: Annotated[float | None, Field(description="Subtract this once from tokens generated before.")] = (
        None
    )
    logit_bias: Annotated[
        dict[str, float] | None, Field(max_length=MOST_BIASES, description="Token id -> what is added to its score.")
    ] = None
    ignore_eos: Annotated[
        bool | None, Field(description="Go on after the tokens that end a text; for measurements.")
    ] = None
    speculation: Annotated[
        Literal["off"] | Depth | None,
        Field(description='Ours: "off" decodes plainly, a number is the largest depth of the token trees.'),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        Field(description="JSON, as `json_object` or by a `json_schema`; every token keeps to it."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Field(description="vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` (in Lark's form)."),
    ] = None
    user: Annotated[str | None, Field(description="An identifier of yours; it changes nothing.")] = None


class Function(Strict):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments, an object.")] = None
    strict: Annotated[bool | None, Field(description="Whether calls are held to the schema at every token.")] = None


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
    arguments: Annotated[str, Field(description="The JSON text of an object.")]
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None


class ToolCall(Sent):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Field(exclude=True)] = None


class ChatMessage(Sent):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(description="The calls of an earlier answer.")] = None
    tool_call_id: Annotated[str | None, Field(description="The call whose result this is.")] = None
    parsed: Annotated[Any, Field(exclude=True)] = None


class ChatRequest(Sampled):
    messages: Annotated[
        list[ChatMessage],
        Field(description="The conversation; see [below](#messages-and-tools)."),
    ]
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="The same as `max_tokens`.")] = None
    logprobs: Annotated[
        bool | None, Field(description="Report the log probability of each token, of the target at temperature 1.")
    ] = None
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MOST_TOP, description="Report those of so many of the likeliest tokens too; needs `logprobs`."),
    ] = None
    tools: Tools = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenTool | None,
        Field(description="Whether the answer calls functions, or the one that it must call; default `auto`."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Whether the answer may call several functions; default true.")
    ] = None


class CompletionRequest(Sampled):
    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        Field(description="A text, token ids, or a list of either."),
    ]
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MOST_TOP, description="Report log probabilities, and those of so many of the likeliest tokens."),
    ] = None
    echo: Annotated[bool | None, Field(description="Put the prompt before the text; not with `logprobs`.")] = None


class TokenizeRequest(Named):
    prompt: Annotated[str | None, Field(description="A text.")] = None
    messages: Annotated[list[ChatMessage] | None, Field(description="Or a conversation.")] = None
    tools: Tools = None


class DetokenizeRequest(Named):
    tokens: Annotated[list[int], Field(description="Token ids.")]
