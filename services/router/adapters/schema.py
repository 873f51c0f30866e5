"""The JSON that clients send: strict pydantic models, one a shape.

Fields that hold a choice of shapes (`messages`, `content`, `documents`) stay raw here and are read one by one in
`parse`, so that an error names its exact path.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "REMEDIES",
    "UNSUPPORTED",
    "AnthropicSource",
    "ChatBody",
    "CohereData",
    "CohereDocument",
    "CompletionBody",
    "DocumentBody",
    "DocumentFields",
    "DocumentPart",
    "HypicOptions",
    "InvalidateBody",
    "JsonSchemaFormat",
    "MessageBody",
    "PartOptions",
    "PinBody",
    "ResponseFormat",
    "SharedBody",
    "StopList",
    "StopText",
    "StructuredOutputs",
    "TextPart",
]

# Parameters of OpenAI's and vLLM's API that would change the reply and cannot be honoured, with the values that
# ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


# What to do instead, where leaving the parameter out is not all there is to say.
REMEDIES = {
    "best_of": "ask for several choices with n, and choose among them by their logprobs",
    "prompt_logprobs": "log probabilities are told of generated tokens only, by logprobs",
    "echo": "put the prompt in front of the reply on the client's side",
    "suffix": "put what follows into the prompt, in the form that the model was trained on",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "this server writes text; ask for ['text']",
    "audio": "this server writes text",
    "web_search_options": "search on the client's side and send what was found as documents",
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Closed(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class HypicOptions(_Closed):
    """Our own options."""

    reuse: Literal["exact", "compose", "off"] = "compose"
    cold: Literal["parallel", "live"] = "parallel"
    explain: bool = False


class PartOptions(_Closed):
    """`hypic` inside a content part."""

    segment: bool = False


class StreamOptions(_Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Tag = Annotated[str, Field(min_length=1, max_length=256)]


Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SharedBody(BaseModel):
    """What both endpoints accept; unknown fields are kept, to be named in a response header."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=300)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: str | None = None
    # vLLM's: lower is sooner.
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    hypic: HypicOptions | None = None


class ChatBody(SharedBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Any], Field(min_length=1)]
    documents: list[Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionBody(SharedBody):
    """`POST /v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class StopList(_Strict):
    """The list form of `stop`."""

    stop: Annotated[list[Stop], Field(max_length=4)]


class StopText(_Strict):
    """The string form of `stop`."""

    stop: Stop


class ResponseFormat(_Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None


class JsonSchemaFormat(_Strict):
    """Its `json_schema`; strict or not, the schema is kept to."""

    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    name: str | None = None
    strict: bool | None = None


class StructuredOutputs(_Closed):
    """vLLM's `structured_outputs`, and what its `guided_` parameters hold."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None


class MessageBody(_Strict):
    """One message."""

    role: str
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None


class TextPart(_Strict):
    """A content part of type `text`."""

    text: str
    hypic: PartOptions | None = None


class DocumentFields(_Strict):
    """A document in plain form."""

    text: str
    title: str | None = None
    id: str | None = None


class DocumentBody(_Closed):
    """`POST /v1/documents`: a text, or text parts that are joined."""

    id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    title: Annotated[str, Field(max_length=4096)] | None = None
    text: str | None = None
    parts: Annotated[list[Any], Field(min_length=1)] | None = None
    tags: Annotated[list[Tag], Field(max_length=32)] = []
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    namespace: Literal["public"] | None = None


class InvalidateBody(_Closed):
    """`POST /v1/invalidate`: exactly one of tag, tenant and model."""

    tag: Tag | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    namespace: Literal["public"] | None = None


class PinBody(_Closed):
    """`POST` and `DELETE /v1/pins`: a document, of the caller's tenant unless one is named, or a whole tenant."""

    document: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class CohereData(_Strict):
    """The `data` of a document in Cohere's form."""

    text: str | None = None
    snippet: str | None = None
    title: str | None = None


class CohereDocument(_Strict):
    """A document in Cohere's form; `data` is text or a `CohereData`."""

    data: Any
    id: str | None = None


class AnthropicSource(_Strict):
    """The `source` of a document in Anthropic's form."""

    type: Literal["text"]
    data: str


class DocumentPart(_Strict):
    """A content part of type `document`: one of three forms, with the outer title and id as defaults."""

    document: Any = None
    source: Any = None
    text: str | None = None
    title: str | None = None
    id: str | None = None
