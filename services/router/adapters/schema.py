"""The JSON that clients send: strict pydantic models, one a shape.

Fields that hold a choice of shapes (`messages`, `content`, `documents`) stay raw here and are read one by one in
`parse`, so that an error names its exact path; `shapes` says what they hold for the OpenAPI document.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from services.router.adapters.fields import Closed, Strict
from services.router.adapters.shapes import (
    CALLS,
    CONTENT,
    DATA,
    DOCUMENT,
    DOCUMENTS,
    GUIDED_CHOICE,
    GUIDED_JSON,
    GUIDED_TEXT,
    MAX_TOOLS,
    MESSAGES,
    PROMPT,
    RESPONSE_FORMAT,
    SCHEMA_FORMAT,
    SOURCE,
    STOPS,
    STRUCTURED,
    TOOL_CHOICE,
    TOOLS,
)

__all__ = [
    "BREAKPOINT",
    "AnthropicSource",
    "CacheBreakpoint",
    "CacheControl",
    "ChatBody",
    "CohereData",
    "CohereDocument",
    "CompletionBody",
    "DocumentFields",
    "DocumentPart",
    "HypicOptions",
    "JsonSchemaFormat",
    "Marked",
    "MessageBody",
    "PartOptions",
    "ResponseFormat",
    "SharedBody",
    "StopList",
    "StopText",
    "StructuredOutputs",
    "TextPart",
]


_MAX_BLOCKS = 1_000_000


class HypicOptions(Closed):
    """Our own options."""

    reuse: Literal["exact", "compose", "off"] = Field(
        default="compose",
        description="What may be reused: prefix snapshots alone, also segments wherever they stand, or nothing.",
    )
    cold: Literal["parallel", "live", "auto"] | None = Field(
        default=None,
        description="A segment without a stored state is captured ahead of the reply, or computed in place and captured later, or"
        " whichever costs less now. Default: the deployment's.",
    )
    refresh: Annotated[int, Field(ge=0, le=_MAX_BLOCKS)] | Literal["auto"] | None = Field(
        default=None,
        description="How many blocks of reused segments, those that the question attends to most, are recomputed in place;"
        " `auto`: as many as fit into `ttft_budget_seconds`. Default: the deployment's.",
    )
    ttft_budget_seconds: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None = Field(
        default=None,
        description="With `refresh: auto`: seconds from the engine's admission to the first token. Default: the deployment's.",
    )
    explain: bool = Field(default=False, description="Whether the reply says how every part was served.")
    tag: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Under which of the server's tags the quality of composed answers is watched; the tenant's group where it is"
        " none of them.",
    )


BREAKPOINT = "A prefix snapshot may stand behind this, and is reused exactly; it makes no segment."


class CacheControl(Strict):
    """Anthropic's breakpoint."""

    type: Literal["ephemeral"] = Field(description="The kind of breakpoint.")
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Accepted, without effect.")


class CacheBreakpoint(Strict):
    """OpenAI's breakpoint."""

    mode: Literal["explicit"] = Field(default="explicit", description="The kind of breakpoint.")


class Marked(Strict):
    """What a breakpoint may stand behind."""

    cache_control: CacheControl | None = Field(default=None, description=BREAKPOINT)
    prompt_cache_breakpoint: CacheBreakpoint | None = Field(default=None, description=BREAKPOINT)

    @property
    def is_breakpoint(self) -> bool:
        """Whether one does."""
        return bool(self.cache_control or self.prompt_cache_breakpoint)


class PartOptions(Closed):
    """`hypic` inside a content part."""

    segment: bool = Field(default=False, description="This text is self-contained, and reused wherever it stands.")


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool = Field(default=False, description="A last chunk without choices carries `usage`.")


Stop = Annotated[str, Field(min_length=1, max_length=256)]
# Its length is checked with its path.
DocumentId = Annotated[
    str | None, WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 512}, {"type": "null"}]})
]


Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SharedBody(BaseModel):
    """What both endpoints accept; unknown fields are kept, to be named in a response header."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str = Field(description="The served model's name, as `GET /v1/models` tells it.")
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Tokens of the reply at most, within what the context leaves."
    )
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = Field(
        default=None, description="0 is greedy; 1 by default."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Draw among the likeliest tokens of this probability together; 1 by default."
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        default=None, description="Draw among so many of the likeliest tokens; 0 and -1 take all."
    )
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Leave out tokens below this share of the likeliest one's probability."
    )
    presence_penalty: Penalty | None = Field(
        default=None, description="Taken from logits of tokens that were generated."
    )
    frequency_penalty: Penalty | None = Field(
        default=None, description="Taken from a token's logit as often as it was generated."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] | None = Field(
        default=None, description="Divides positive logits, and multiplies negative ones, of tokens seen before."
    )
    logit_bias: Annotated[dict[str, Bias], Field(max_length=300)] | None = Field(
        default=None, description="Added to logits, by token id."
    )
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="Ahead of so many tokens nothing ends the reply."
    )
    ignore_eos: bool | None = Field(default=None, description="The model's own end does not end the reply.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        default=None, description="Tokens that end the reply, beside the model's own."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        default=None, description="The same seed draws the same tokens."
    )
    response_format: Annotated[Any, RESPONSE_FORMAT] = Field(default=None, description="What the reply is.")
    structured_outputs: Annotated[Any, STRUCTURED] = Field(default=None, description="vLLM's form of the same.")
    guided_json: Annotated[Any, GUIDED_JSON] = Field(default=None, description="The reply keeps to this JSON Schema.")
    guided_regex: Annotated[Any, GUIDED_TEXT] = Field(
        default=None, description="The reply is of this regular expression."
    )
    guided_choice: Annotated[Any, GUIDED_CHOICE] = Field(default=None, description="The reply is one of these texts.")
    guided_grammar: Annotated[Any, GUIDED_TEXT] = Field(default=None, description="The reply is of this grammar.")
    n: Annotated[int, Field(ge=1, le=16)] | None = Field(default=None, description="How many choices; 1 by default.")
    stop: Annotated[Any, STOPS] = Field(default=None, description="Texts that end the reply and are no part of it.")
    stream: bool | None = Field(default=None, description="The reply comes in server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="States are shared among requests of a tenant with the same salt alone."
    )
    user: str | None = Field(default=None, description="Accepted, without effect.")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        default=None, description="Where requests wait, lower is sooner; no lower than the key's tenant may."
    )
    prompt_cache_key: str | None = Field(default=None, description="Accepted: states are found by their content.")
    prompt_cache_retention: str | None = Field(default=None, description="Accepted, without effect.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Accepted, without effect.")
    cache_control: CacheControl | None = Field(
        default=None, description="Accepted: snapshots stand at the ends of messages anyway."
    )
    hypic: HypicOptions | None = Field(default=None, description="What is reused, and whether the reply explains it.")


class ChatBody(SharedBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Any], Field(min_length=1), MESSAGES] = Field(description="The conversation.")
    documents: Annotated[list[Any], DOCUMENTS] | None = Field(
        default=None, description="Segments that stand in the last user message ahead of its text, in this order."
    )
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS), TOOLS] | None = Field(
        default=None,
        description="Functions that the model may call. The chat template writes them; together they are a segment.",
    )
    tool_choice: Annotated[Any, TOOL_CHOICE] = Field(
        default=None,
        description="`none`: calls in the reply stay text; `required`: the reply is a call, or several; a function: it is one"
        " call of that.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: the reply is one call alone; with a forced choice only."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="OpenAI's newer name of `max_tokens`; it counts where both are given."
    )
    logprobs: bool | None = Field(default=None, description="Tell the log probabilities of generated tokens.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="And those of so many likeliest tokens at each place."
    )


class CompletionBody(SharedBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, PROMPT] = Field(description="A text, or several; token ids are refused.")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="Tell log probabilities of generated tokens, and of so many likeliest ones."
    )


class StopList(Strict):
    """The list form of `stop`."""

    stop: Annotated[list[Stop], Field(max_length=4)]


class StopText(Strict):
    """The string form of `stop`."""

    stop: Stop


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="What the reply is.")
    json_schema: Annotated[Any, SCHEMA_FORMAT] = Field(default=None, description="The schema that it keeps to.")


class JsonSchemaFormat(Strict):
    """Its `json_schema`; strict or not, the schema is kept to."""

    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema", description="The JSON Schema.")]
    name: str | None = Field(default=None, description="Accepted, without effect.")
    strict: bool | None = Field(default=None, description="Accepted, without effect.")


class StructuredOutputs(Closed):
    """vLLM's `structured_outputs`, and what its `guided_` parameters hold."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json", description="A JSON Schema, or its text.")] = None
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    regex: Annotated[str, Field(min_length=1)] | None = Field(default=None, description="A regular expression.")
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="One of these texts."
    )
    grammar: Annotated[str, Field(min_length=1)] | None = Field(default=None, description="A grammar.")


class MessageBody(Strict):
    """One message."""

    role: str = Field(
        description="The speaker.", json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]}
    )
    content: Annotated[Any, CONTENT] = Field(default=None, description="A text, or parts in order.")
    tool_calls: Annotated[Any, CALLS] = Field(default=None, description="Calls of an assistant's earlier turn.")
    tool_call_id: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="The call whose result a message of the role `tool` is."
    )
    function_call: SkipJsonSchema[Any] = None


class TextPart(Marked):
    """A content part of type `text`."""

    text: str = Field(description="The text.")
    hypic: PartOptions | None = Field(default=None, description="How the text is reused.")


class DocumentFields(Strict):
    """A document in plain form."""

    text: str = Field(description="The text, not empty.", json_schema_extra={"minLength": 1})
    title: str | None = Field(default=None, description="A line ahead of the text.")
    id: DocumentId = Field(default=None, description="The name by which its states are invalidated.")


class CohereData(BaseModel):
    """The `data` of a document in Cohere's form. Other fields are lines `name: value` ahead of the text, in their order."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    text: str | None = Field(default=None, description="The text.")
    snippet: str | None = Field(default=None, description="The text, where `text` is not given.")
    title: str | None = Field(default=None, description="A line ahead of the text.")


class CohereDocument(Strict):
    """A document in Cohere's form; `data` is text or a `CohereData`."""

    data: Annotated[Any, DATA] = Field(description="A text, or an object of fields.")
    id: DocumentId = Field(default=None, description="The name by which its states are invalidated.")


class AnthropicSource(Strict):
    """The `source` of a document in Anthropic's form."""

    type: Literal["text"] = Field(description="The kind of source.")
    data: str = Field(description="The text, not empty.", json_schema_extra={"minLength": 1})
    media_type: Literal["text/plain"] | None = Field(default=None, description="The kind of text.")


class DocumentPart(Marked):
    """A content part of type `document`: one of three forms, with the outer title and id as defaults."""

    document: Annotated[Any, DOCUMENT] = Field(default=None, description="The document, as an entry of `documents`.")
    source: Annotated[Any, SOURCE] = Field(default=None, description="Anthropic's form of the text.")
    context: str | None = Field(default=None, description="Where it comes from, say: a line ahead of the text.")
    text: str | None = Field(default=None, description="The text, where neither `document` nor `source` is given.")
    title: str | None = Field(default=None, description="A line ahead of the text.")
    id: DocumentId = Field(default=None, description="The name by which its states are invalidated.")
