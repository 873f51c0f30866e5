"""The description of a workload: a TOML file, strictly checked. docs/benchmarks.md says what the fields mean."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bench.traffic.lengths import Quantiles

__all__ = ["SHIPPED", "SystemLayer", "Workload", "WorkloadError", "read_workload", "shipped_names"]

SHIPPED = Path(__file__).parent / "workloads"


class WorkloadError(Exception):
    """A file describes no workload; the message names file, field and remedy."""


def _read_length(value: object) -> object:
    """A number of tokens, or points of a distribution."""
    if isinstance(value, Quantiles):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Quantiles.read(value)
    if not isinstance(value, list) or not all(isinstance(own, list) and len(own) == 2 for own in value):
        raise ValueError("must be a number of tokens, or points [[0.0, 100], [0.5, 300], [1.0, 900]]")
    if not all(isinstance(number, int | float) for own in value for number in own):
        raise ValueError("must have numbers alone in its points")
    return Quantiles.read([(own[0], own[1]) for own in value])


Length = Annotated[Quantiles, BeforeValidator(_read_length)]
Share = Annotated[float, Field(ge=0, le=1)]
Exponent = Annotated[float, Field(ge=0, le=5)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class Arrivals(_Section):
    """poisson: one by one at exponential intervals; bursty: as many together as a geometric number with a mean of `burst`."""

    kind: Literal["poisson", "bursty"] = "poisson"
    burst: float = Field(default=1.0, ge=1, le=1000)

    @model_validator(mode="after")
    def _check_burst(self) -> Self:
        if (self.kind == "bursty") != (self.burst > 1):
            raise ValueError("burst must be over 1 with kind = 'bursty', and left out otherwise")
        return self


class Corpus(_Section):
    """Of each tenant. zipf: the exponent by which documents are asked for; updates_per_minute: share of the documents whose
    text changes in a minute; births_per_minute: share that new documents replace in a minute.
    """

    documents: int = Field(ge=1, le=1_000_000)
    tokens: Length
    zipf: Exponent = 1.0
    updates_per_minute: Share = 0.0
    births_per_minute: Share = 0.0


class Requests(_Section):
    """documents: how many different ones a request brings; share_with_documents: of the requests that bring any.

    recent_share: of the documents that are chosen among the last `recent_uses` uses, what people ask about these days, and not
    by popularity. order: shuffled anew, ranked by popularity, or by name. place: with every question, or in the first message
    of a conversation.
    """

    documents: Length
    share_with_documents: Share = 1.0
    recent_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    recent_uses: int = Field(default=1000, ge=1, le=1_000_000)
    order: Literal["shuffled", "ranked", "named"] = "shuffled"
    place: Literal["question", "first_message"] = "question"
    question_tokens: Length
    answer_tokens: Length


class SystemLayer(_Section):
    """A run of the system prompt: one of `variants` by Zipf's law; for `new_share` of the requests one that nobody has again, not
    even later in its conversation.
    """

    tokens: Length
    variants: int = Field(default=0, ge=0, le=100_000)
    zipf: Exponent = 1.0
    new_share: Share = 0.0

    @model_validator(mode="after")
    def _check_variants(self) -> Self:
        if not self.variants and self.new_share < 1:
            raise ValueError("variants must be at least 1 where new_share is below 1")
        return self


class Conversations(_Section):
    """share: of the requests that go on with an earlier one; gap_seconds: between a request and the next of its conversation;
    most_tokens: a conversation that would grow beyond them ends; question_tokens: of what is asked later in one, where it
    differs from what is asked first.
    """

    share: Annotated[float, Field(gt=0, lt=1)]
    gap_seconds: float = Field(default=0.0, ge=0)
    most_tokens: int = Field(ge=1)
    question_tokens: Length | None = None


class Tenants(_Section):
    """count: tenants that share nothing; hot_share: of the requests that are the first one's, the others share the rest."""

    count: int = Field(default=1, ge=1, le=1000)
    hot_share: Share | None = None


class Workload(_Section):
    """All sections. name: letters, digits and `_`; title: what people call it; seed: of everything that is drawn."""

    name: str = Field(pattern=r"^\w{1,40}$")
    title: str = Field(min_length=1, max_length=200)
    seed: int = Field(default=1, ge=0, lt=2**31)
    arrivals: Arrivals = Arrivals()
    corpus: Corpus
    request: Requests
    system: tuple[SystemLayer, ...] = ()
    conversations: Conversations | None = None
    tenants: Tenants = Tenants()

    @model_validator(mode="before")
    @classmethod
    def _read_lists(cls, content: object) -> object:
        """TOML has lists, strict models want tuples."""
        if isinstance(content, dict) and isinstance(content.get("system"), list):
            return content | {"system": tuple(content["system"])}
        return content

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.request.documents.at(1.0) > self.corpus.documents:
            raise ValueError("request.documents: asks for more documents than corpus.documents")
        if self.request.place == "first_message" and self.conversations is None:
            raise ValueError("request.place: 'first_message' is of conversations alone; add [conversations]")
        return self

    def scaled(self, factor: float) -> "Workload":
        """The same with all lengths times a factor: numbers of documents and of requests stay."""
        corpus = self.corpus.model_copy(update={"tokens": self.corpus.tokens.scaled(factor)})
        request = self.request.model_copy(
            update={
                "question_tokens": self.request.question_tokens.scaled(factor),
                "answer_tokens": self.request.answer_tokens.scaled(factor),
            }
        )
        layers = tuple(own.model_copy(update={"tokens": own.tokens.scaled(factor)}) for own in self.system)
        talks = self.conversations
        if talks is not None:
            longest = max(1, round(factor * talks.most_tokens))
            later = talks.question_tokens and talks.question_tokens.scaled(factor)
            talks = talks.model_copy(update={"most_tokens": longest, "question_tokens": later})
        changes = {"corpus": corpus, "request": request, "system": layers, "conversations": talks}
        return self.model_copy(update=changes)


def shipped_names() -> list[str]:
    """Names of the files that come along."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_workload(name: str | Path) -> Workload:
    """A workload that comes along, by its name, or one of a file.

    Raises:
        WorkloadError: there is none, or a field is wrong.
    """
    path = SHIPPED / f"{name}.toml" if str(name) in shipped_names() else Path(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}; shipped are {', '.join(shipped_names())}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WorkloadError(f"{path}: is no TOML: {error}") from error
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        raise WorkloadError(f"{path}: {_first_fault(error)}") from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    field = ".".join(str(step) for step in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{field} is unknown; leave it out, or correct its name"
    if fault["type"] == "missing":
        return f"{field} is missing; the shipped workloads show what it means"
    said = fault["msg"].removeprefix("Value error, ")
    given = "" if fault["type"] == "value_error" and not field else f", not {fault['input']!r:.80}"
    return f"{field}: {said}{given}" if field else said
