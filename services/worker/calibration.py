"""The calibration card: what one profile of one model loses and costs, on which prompts. A file, `calibration.json`.

`hypic calibrate` writes it, the worker checks it against what it serves, the router shows it. Its digest covers its content, so
that figures edited by hand are no measurement any more.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.worker.errors import WorkerError
from services.worker.profile import Profile

__all__ = [
    "CalibrationCard",
    "CalibrationError",
    "CardModel",
    "CardPrompts",
    "CardSetting",
    "Estimate",
    "MeasuredCost",
    "load_card",
    "mismatch",
    "seal_card",
    "write_card",
]

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Seconds = Annotated[float, Field(ge=0.0)]
_Nats = Annotated[float, Field(ge=0.0)]
_Text = Annotated[str, Field(min_length=1, max_length=500)]


class CalibrationError(WorkerError):
    """The card cannot be used; the message names the field and the remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Estimate(_Part):
    """A mean over prompts with its interval of 95 %, which reckons with one more prompt at the card's cut."""

    value: _Nats
    low: _Nats
    high: _Nats


class CardModel(_Part):
    """What was measured. revision: digest over config and weights; dtype: of weights, keys and values."""

    name: _Text
    revision: _Digest
    family: _Text
    dtype: Literal["float32", "bfloat16"]


class CardPrompts(_Part):
    """On what. file: its name alone; digest: of its bytes; asked of in_file prompts; tokens are means over those asked.

    system_digest: of the system prompt that was given beside the file; None without.
    """

    file: _Text
    digest: _Digest
    system_digest: _Digest | None
    asked: Annotated[int, Field(ge=1)]
    in_file: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[float, Field(gt=0)]
    document_tokens: Annotated[float, Field(gt=0)]


class MeasuredCost(_Part):
    """Seconds of one pass, `pass_seconds + token_seconds × live tokens`, fitted to `points` passes of one prompt each.

    worst_error: the largest relative distance of a measured pass from the line.
    """

    pass_seconds: _Seconds
    token_seconds: _Seconds
    points: Annotated[int, Field(ge=2)]
    worst_error: Annotated[float, Field(ge=0.0)]
    how: _Text


class CardSetting(_Part):
    """One setting on `prompts` prompts: all that the card speaks of, or fewer where encodings were compared in less time.

    live_share: of document tokens that run through the model; kl: nats a token from a full recompute's distribution, the
    mean over the first tokens of its reply; first_kl: of the first token; agreement: share of prompts whose first tokens
    are all the same; seconds: predicted, to the first token, with every segment in memory; state_bytes: stored for the
    linear layers of a segment, where encodings were compared; on_front: no measured setting has less loss at no more cost.
    """

    name: _Text
    prime: str
    seam_window: Annotated[int, Field(ge=0)]
    seam_share: _Share
    seam_window_max: Annotated[int, Field(ge=0)]
    refresh: Annotated[int, Field(ge=0)]
    encoding: _Text
    prompts: Annotated[int, Field(ge=1)]
    live_share: _Share
    kl: Estimate
    first_kl: Estimate
    agreement: Estimate
    seconds: _Seconds | None
    state_bytes: Annotated[int, Field(ge=0)] | None
    on_front: bool


class CalibrationCard(_Part):
    """The whole card. tokens: how many of a reply are compared; cut: nats that a prompt counts with at most where the upper end
    of an interval reckons with prompts not asked; full_seconds: predicted for a full recompute.
    """

    version: Literal[1]
    model: CardModel
    profile_digest: _Digest
    profile: dict[str, str | int | float]
    prompts: CardPrompts
    tokens: Annotated[int, Field(ge=1)]
    cut: Annotated[float, Field(gt=0.0)]
    rule: _Text
    chosen: CardSetting
    full_seconds: _Seconds | None
    cost: MeasuredCost | None
    settings: Annotated[tuple[CardSetting, ...], Field(strict=False)]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$")]
    device: _Text
    versions: dict[str, str]
    command: _Text
    seconds: _Seconds
    digest: _Digest


def seal_card(**content: Any) -> CalibrationCard:  # noqa: ANN401 # the card's own fields
    """A card of this content, all but version and digest."""
    unsealed = CalibrationCard(version=1, digest="0" * 64, **content)
    return unsealed.model_copy(update={"digest": _digest(unsealed)})


def write_card(card: CalibrationCard, path: Path) -> None:
    """As a file that `load_card` reads."""
    path.write_text(json.dumps(card.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_card(path: Path) -> CalibrationCard:
    """Read a card.

    Raises:
        CalibrationError: the file is missing, malformed, or not as it was written.
    """
    try:
        card = CalibrationCard.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"not readable ({error.strerror}); run `hypic calibrate`, or name another file"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise CalibrationError(f"{place}: {first['msg']}; run `hypic calibrate` anew") from error
    if card.digest != _digest(card):
        raise CalibrationError("digest: the content has been changed since it was measured; run `hypic calibrate` anew")
    return card


def mismatch(card: CalibrationCard, revision: str, dtype: str, profile: Profile) -> str:
    """Why a card does not speak of what is served; empty where it does."""
    if card.model.revision != revision:
        return (
            f"model.revision: the card is of the weights {card.model.revision[:12]}, and {revision[:12]} are served;"
            " calibrate this checkpoint"
        )
    if card.model.dtype != dtype:
        return f"model.dtype: measured in {card.model.dtype}, and {dtype} is served; calibrate with --dtype {dtype}"
    served = asdict(profile)
    for name in sorted(served.keys() | card.profile.keys()):
        if served.get(name) != card.profile.get(name):
            return (
                f"profile.{name}: measured with {card.profile.get(name)!r}, and {served.get(name)!r} is served; put the"
                " profile beside the card into place, or calibrate with --keep-profile"
            )
    if card.profile_digest != profile.digest(revision, dtype):
        return "profile_digest: states had another layout when it was measured; calibrate anew"
    return ""


def _digest(card: CalibrationCard) -> str:
    content = card.model_dump(mode="json", exclude={"digest"})
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
