"""What a client asks for, after its JSON has been checked and normalised."""

from dataclasses import dataclass, field
from enum import StrEnum

from blake3 import blake3

from services.router.domain.errors import RouterError
from services.router.domain.rates import NO_RATES, Rates
from services.router.domain.tools import Tool, ToolCall

__all__ = [
    "ChatPrompt",
    "Cold",
    "Content",
    "Document",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "Message",
    "Namespace",
    "PromptError",
    "Refresh",
    "Reuse",
    "ReuseOptions",
    "Role",
    "Sampling",
    "Text",
    "TextPrompt",
]


# A worker's batch and its waiting line are for other requests too.
_MOST_AT_ONCE = 16


class PromptError(RouterError):
    """The prompt can never be served as it is.

    `param` is the path of the field in the client's JSON, `code` the machine-readable kind.
    """

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Role(StrEnum):
    """The speakers that a chat template knows; they are template words, not client strings."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    """A client string. `is_segment` is set by the client's `hypic: {segment: true}`, `is_breakpoint` by its marks for caches."""

    text: str
    is_segment: bool = False
    is_breakpoint: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A client document; `document_id` and `title` are empty when the client gave none."""

    text: str
    title: str = ""
    document_id: str = ""
    # A document is the same with and without a mark behind it.
    is_breakpoint: bool = field(default=False, compare=False)

    @property
    def digest(self) -> bytes:
        """BLAKE3 over title and text: tells versions of a document apart, whatever the model."""
        return blake3(len(self.title.encode()).to_bytes(8, "big") + self.title.encode() + self.text.encode()).digest()


Content = Text | Document


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` holds at least one item, unless the assistant only calls tools.

    `answers`: the id of the call whose result a tool's message is; empty where none is named.
    """

    role: Role
    content: tuple[Content, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, and documents that stand ahead of the text of its last user message.

    `tools` stand where the chat template puts them.
    """

    messages: tuple[Message, ...]
    documents: tuple[Document, ...] = ()
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text for `/v1/completions`, cut at the configured separator: all but the last piece are segments."""

    pieces: tuple[str, ...]


class Reuse(StrEnum):
    """What may be reused: prefix snapshots only, also segments, or nothing."""

    EXACT = "exact"
    COMPOSE = "compose"
    OFF = "off"


class Cold(StrEnum):
    """What happens to a segment without a stored state: captured first, or computed in place and captured later.

    AUTO: whichever costs less now; see `choose_cold`.
    """

    PARALLEL = "parallel"
    LIVE = "live"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Refresh:
    """How many blocks of segments are recomputed in place, the most wanted ones; None: as many as fit into the budget.

    budget_seconds: from the engine's admission to the first token.
    """

    blocks: int | None
    budget_seconds: float | None = None

    @property
    def is_none(self) -> bool:
        """Nothing is."""
        return self.blocks == 0


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """The client's `hypic` object; what is None is the deployment's to say."""

    reuse: Reuse = Reuse.COMPOSE
    cold: Cold | None = None
    explain: bool = False
    refresh: Refresh | None = None
    ttft_budget_seconds: float | None = None
    tag: str = ""


class GrammarKind(StrEnum):
    """The notations of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply is held to; `param` is the field that says it. The source of choices is a JSON list."""

    kind: GrammarKind
    source: str
    param: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; `temperature` 0 is greedy, `top_k` 0 keeps all, `max_tokens` None fills the context.

    logit_bias: token and what is added to its logit; min_tokens: before which no stop token or string ends the reply;
    stop_token_ids: beside the model's own, which ignore_eos leaves out; logprobs: how many alternatives are told with every
    token's log probability, None tells none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None

    def all_stop_token_ids(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end the reply, from the model's own."""
        return self.stop_token_ids if self.ignore_eos else tuple(dict.fromkeys((*own, *self.stop_token_ids)))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share states with this request; `budget_bytes` bounds the tenant's states, 0 leaves the common bound."""

    tenant: str
    salt: str = ""
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, whichever endpoint it came through.

    `max_in_flight`: how many requests its tenant may have under way at once; 0 is no bound.
    `rates`: how many in a minute. `priority`: where requests wait, lower is sooner. num_choices: replies to each
    prompt; further_prompts: answered beside the first one.
    """

    model: str
    prompt: ChatPrompt | TextPrompt
    sampling: Sampling
    stop: tuple[str, ...]
    options: ReuseOptions
    namespace: Namespace
    max_in_flight: int = 0
    rates: Rates = NO_RATES
    priority: int = 0
    num_choices: int = 1
    further_prompts: tuple[TextPrompt, ...] = ()

    @property
    def num_replies(self) -> int:
        """Choices of all prompts."""
        return self.num_choices * (1 + len(self.further_prompts))

    @property
    def num_at_once(self) -> int:
        """How many of them are under way at a time, which is what the request counts for in its tenant's bound."""
        return min(self.num_replies, _MOST_AT_ONCE, self.max_in_flight or _MOST_AT_ONCE)
