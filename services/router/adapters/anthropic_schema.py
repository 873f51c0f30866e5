"""The JSON of Anthropic's Messages API, as far as it is served."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.router.adapters.fields import Strict
from services.router.adapters.schema import BREAKPOINT, CacheControl, HypicOptions
from services.router.adapters.shapes import MAX_TOOLS, list_of, ref

__all__ = [
    "ANTHROPIC_SHAPES",
    "AnthropicMessage",
    "AnthropicTool",
    "AnthropicToolChoice",
    "CountBody",
    "MessagesBody",
    "Thinking",
    "ToolResultBlock",
    "ToolUseBlock",
]

_TEXT = {"type": "string"}
_SYSTEM = WithJsonSchema({"anyOf": [_TEXT, list_of(ref("TextPart"), 1), {"type": "null"}]})
_BLOCKS = WithJsonSchema({"anyOf": [_TEXT, list_of(ref("MessageBlock"), 1)]})
_RESULT = WithJsonSchema({"anyOf": [_TEXT, list_of(ref("ContentPart"), 1), {"type": "null"}]})
_MESSAGES = WithJsonSchema(list_of(ref("AnthropicMessage"), 1))
_TOOLS = WithJsonSchema(list_of(ref("AnthropicTool"), 0, MAX_TOOLS))
# Choices of shapes that no model holds, for the OpenAPI document.
ANTHROPIC_SHAPES: dict[str, Any] = {
    "MessageBlock": {"anyOf": [ref(name) for name in ("TextPart", "DocumentPart", "ToolUseBlock", "ToolResultBlock")]}
}
Name = Annotated[str, Field(min_length=1, max_length=64)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
StopSequence = Annotated[str, Field(min_length=1, max_length=256)]


class AnthropicMessage(Strict):
    """One message."""

    role: Literal["user", "assistant"] = Field(description="The speaker.")
    content: Annotated[Any, _BLOCKS] = Field(description="A text, or blocks in order.")


class ToolUseBlock(Strict):
    """A call that the model has made in an earlier turn."""

    type: Literal["tool_use"] = Field(description="The kind of block.")
    id: CallId = Field(description="The id that its result names.")
    name: Name = Field(description="What was called.")
    input: dict[str, Any] = Field(description="The arguments.")


class ToolResultBlock(Strict):
    """What a call has given."""

    type: Literal["tool_result"] = Field(description="The kind of block.")
    tool_use_id: CallId = Field(description="The call.")
    content: Annotated[Any, _RESULT] = Field(default=None, description="A text, or texts and documents in order.")
    is_error: bool | None = Field(default=None, description="Accepted, without effect.")
    cache_control: CacheControl | None = Field(default=None, description=BREAKPOINT)


class AnthropicTool(Strict):
    """A tool that the model may call."""

    name: Name = Field(description="Its name.", json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    input_schema: dict[str, Any] = Field(description="JSON Schema of its arguments.")
    description: str | None = Field(default=None, description="What it does, for the model.")
    type: Literal["custom"] | None = Field(default=None, description="The kind of tool: the client's own.")
    cache_control: CacheControl | None = Field(default=None, description=BREAKPOINT)


class AnthropicToolChoice(Strict):
    """Whether the model may call tools, or must."""

    type: Literal["auto", "none", "any", "tool"] = Field(
        description="`none`: calls in the reply stay text; `any`: the reply is a call, or several; `tool`: one of `name`."
    )
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Of the tool to be called."
    )
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="The reply is one call alone; with a forced choice only."
    )


class Thinking(Strict):
    """Thinking apart from the reply."""

    type: Literal["disabled"] = Field(description="It cannot be asked for.")


class CountBody(BaseModel):
    """`POST /v1/messages/count_tokens`; unknown fields are kept, to be named in a response header."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str = Field(description="The served model's name, as `GET /v1/models` tells it.")
    messages: Annotated[list[Any], Field(min_length=1), _MESSAGES] = Field(description="The conversation.")
    system: Annotated[Any, _SYSTEM] = Field(default=None, description="The system's text.")
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS), _TOOLS] | None = Field(
        default=None, description="Functions that the model may call; together they are a segment."
    )
    tool_choice: AnthropicToolChoice | None = Field(default=None, description="Whether tools may be called.")
    thinking: Thinking | None = Field(default=None, description="Only `disabled`.")
    cache_control: CacheControl | None = Field(
        default=None, description="Accepted: snapshots stand at the ends of messages anyway."
    )


class MessagesBody(CountBody):
    """`POST /v1/messages`; unknown fields are kept, to be named in a response header."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(description="Tokens of the reply at most.")
    temperature: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="0 is greedy; 1 by default."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Draw among the likeliest tokens of this probability together."
    )
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Draw among so many of the likeliest tokens; 0 takes all."
    )
    stop_sequences: Annotated[list[StopSequence], Field(max_length=4)] | None = Field(
        default=None, description="Texts that end the reply and are no part of it."
    )
    stream: bool | None = Field(default=None, description="The reply comes in server-sent events.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted, without effect.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="States are shared among requests of a tenant with the same salt alone."
    )
    hypic: HypicOptions | None = Field(default=None, description="What is reused, and whether the reply explains it.")
