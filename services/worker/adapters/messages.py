"""Wire messages to engine types and back; no other module of the worker knows both."""

import math
from collections.abc import Callable, Sequence

from hypic.v1 import worker_pb2

from services.common.content import HASH_BYTES
from services.common.errors import HypicError, InternalError, InvalidRequestError, OverloadedError
from services.worker.adapters.held_states import HeldState
from services.worker.adapters.peer_states import Source
from services.worker.adapters.transfers import WantedState
from services.worker.engine.logprobs import TokenLogprobs
from services.worker.engine.refresh import RefreshOrder, SweepCost
from services.worker.engine.requests import (
    CaptureSegment,
    EngineError,
    EngineFullError,
    FinishedEvent,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    NotServedError,
    PrefilledEvent,
    PromptPart,
    PromptTooLargeError,
    ServedPart,
    Serving,
    SnapshotOrder,
    TokenEvent,
    TurnHold,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.tiers.speeds import TokenSpeed

__all__ = [
    "capture_segments",
    "check_key",
    "event_message",
    "generate_request",
    "held_message",
    "refresh_order",
    "released_message",
    "service_error",
    "turn_hold",
    "wanted_states",
]

_SERVING = {
    worker_pb2.PART_SERVING_LIVE: Serving.LIVE,
    worker_pb2.PART_SERVING_SEGMENT: Serving.SEGMENT,
    worker_pb2.PART_SERVING_PREFIX: Serving.PREFIX,
}
_SERVING_MESSAGE = {serving: message for message, serving in _SERVING.items()}
_FINISH_MESSAGE = {
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
}


def service_error(error: EngineError) -> HypicError:
    """The engine's error as one that crosses the wire."""
    if isinstance(error, PromptTooLargeError | NotServedError):
        return InvalidRequestError(str(error))
    if isinstance(error, EngineFullError):
        return OverloadedError(str(error))
    return InternalError(str(error))


def wanted_states(message: worker_pb2.GenerateRequest) -> dict[bytes, WantedState]:
    """What a checked request's segments need, by key."""
    return {
        part.key: WantedState(
            tuple(part.token_ids),
            tuple(Source(source.worker_id, source.address) for source in part.sources),
            max(0.0, part.source_wait_seconds),
        )
        for part in message.parts
        if part.serving == worker_pb2.PART_SERVING_SEGMENT
    }


def refresh_order(message: worker_pb2.GenerateRequest, speed: TokenSpeed) -> RefreshOrder | None:
    """What a request asks to have refreshed; None for nothing. speed: of combines, as measured so far.

    Raises:
        InvalidRequestError: the budget is no number of seconds above 0.
    """
    if not message.HasField("refresh"):
        return None
    if message.refresh.WhichOneof("form") == "blocks":
        return RefreshOrder(message.refresh.blocks) if message.refresh.blocks else None
    budget, token_seconds = message.refresh.budget_seconds, speed.estimate(1)
    if not 0.0 < budget < math.inf:
        raise InvalidRequestError(f"refresh.budget_seconds: {budget} is no number of seconds above 0")
    cost = None if token_seconds is None else SweepCost(speed.pass_seconds, token_seconds)
    return RefreshOrder(None, budget, cost)


def generate_request(
    message: worker_pb2.GenerateRequest, call_id: str, vocab_size: int, sink: Callable[[GenerateEvent], None]
) -> GenerateRequest:
    """A checked request; the state behind its reply is not held yet.

    Raises:
        InvalidRequestError: a field is missing or out of range.
    """
    if not message.parts or not message.parts[-1].token_ids:
        raise InvalidRequestError("parts: the last part must be live and have at least one token")
    if message.parts[-1].serving != worker_pb2.PART_SERVING_LIVE:
        raise InvalidRequestError("parts: the last part must be live")
    return GenerateRequest(
        request_id=call_id,
        parts=tuple(_part(index, part, vocab_size) for index, part in enumerate(message.parts)),
        sampling=_sampling(message.sampling, vocab_size),
        sink=sink,
        prefix_key=message.prefix_key,
        snapshots=tuple(_snapshot(order, len(message.parts)) for order in message.snapshots),
        priority=message.priority,
        is_held=message.HasField("hold"),
        tenant=message.tenant,
    )


def _part(index: int, part: worker_pb2.PromptPart, vocab_size: int) -> PromptPart:
    serving = _SERVING.get(part.serving)
    if serving is None:
        raise InvalidRequestError(f"parts[{index}].serving: {part.serving} is not known")
    if not part.token_ids:
        raise InvalidRequestError(f"parts[{index}].token_ids: a part has at least one token")
    if serving is Serving.SEGMENT:
        check_key(f"parts[{index}].key", part.key)
    _check_ids(f"parts[{index}].token_ids", part.token_ids, vocab_size)
    is_ordered = part.HasField("capture")
    if is_ordered and serving is not Serving.SEGMENT:
        raise InvalidRequestError(f"parts[{index}].capture: only a part that is served as a segment is captured")
    return PromptPart(tuple(part.token_ids), serving, part.key, is_ordered)


def _snapshot(order: worker_pb2.SnapshotRequest, num_parts: int) -> SnapshotOrder:
    check_key("snapshots.key", order.key)
    if not 1 <= order.after_part < num_parts:
        raise InvalidRequestError(f"snapshots.after_part: must lie between 1 and {num_parts - 1}")
    return SnapshotOrder(order.key, order.after_part)


def _sampling(message: worker_pb2.Sampling, vocab_size: int) -> SamplingOptions:
    _check_ids("sampling.logit_bias", [each.token_id for each in message.logit_bias], vocab_size)
    try:
        return SamplingOptions(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=message.top_k,
            seed=message.seed if message.HasField("seed") else None,
            # A model may declare stop tokens that it has no logits for: they are never drawn.
            stop_ids=frozenset(token for token in message.stop_token_ids if token < vocab_size),
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            logit_bias=tuple((each.token_id, each.bias) for each in message.logit_bias),
            min_tokens=message.min_tokens,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
        )
    except ValueError as error:
        raise InvalidRequestError(f"sampling: {error}") from error


def capture_segments(message: worker_pb2.CaptureRequest, vocab_size: int) -> tuple[CaptureSegment, ...]:
    """Checked segments.

    Raises:
        InvalidRequestError: a key or a token id is malformed, or nothing is to be captured.
    """
    if not message.segments:
        raise InvalidRequestError("segments: name at least one")
    for index, segment in enumerate(message.segments):
        check_key(f"segments[{index}].key", segment.key)
        _check_ids(f"segments[{index}].token_ids", segment.token_ids, vocab_size)
    return tuple(CaptureSegment(segment.key, tuple(segment.token_ids)) for segment in message.segments)


def check_key(field: str, key: bytes) -> None:
    """Raises InvalidRequestError where this is no stored key."""
    if len(key) != HASH_BYTES:
        raise InvalidRequestError(f"{field}: must have {HASH_BYTES} bytes, not {len(key)}")


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(f"{field}: {max(token_ids)} is outside the vocabulary of {vocab_size}")


def held_message(held: HeldState) -> worker_pb2.GenerateEvent:
    """A decode state waits."""
    return worker_pb2.GenerateEvent(
        held=worker_pb2.Held(
            handle=held.handle, num_tokens=len(held.token_ids), size_bytes=held.size_bytes, seconds=held.seconds
        )
    )


def released_message(held: HeldState) -> worker_pb2.GenerateEvent:
    """It waits no more."""
    return worker_pb2.GenerateEvent(released=worker_pb2.Released(taken=held.is_taken))


def turn_hold(message: worker_pb2.GenerateRequest, held_key: bytes, vocab_size: int) -> TurnHold | None:
    """What the engine is to hold behind the reply; None where nothing is wanted.

    Raises:
        InvalidRequestError: a token is out of range.
    """
    _check_ids("closing_token_ids", message.closing_token_ids, vocab_size)
    return TurnHold(held_key, tuple(message.closing_token_ids)) if message.closing_token_ids else None


def event_message(
    event: PrefilledEvent | TokenEvent | FinishedEvent, held_key: bytes = b""
) -> worker_pb2.GenerateEvent:
    """One event of a request; held_key: of the state behind its reply, once that has ended."""
    if isinstance(event, TokenEvent):
        logprobs = [] if event.logprobs is None else [_token_logprobs(event.logprobs)]
        return worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=[event.token_id], logprobs=logprobs))
    if isinstance(event, FinishedEvent):
        finished = worker_pb2.Finished(
            reason=_FINISH_MESSAGE[event.reason],
            decode_seconds=event.decode_seconds,
            generated_tokens=event.generated_tokens,
            held_key=held_key,
        )
        return worker_pb2.GenerateEvent(finished=finished)
    prefilled = worker_pb2.Prefilled(
        parts=[_served_part(part) for part in event.parts],
        queue_seconds=event.queue_seconds,
        combine_seconds=event.combine_seconds,
        fetch_seconds=event.fetch_seconds,
        live_tokens=sum(part.live_tokens for part in event.parts),
    )
    return worker_pb2.GenerateEvent(prefilled=prefilled)


def _token_logprobs(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=logprobs.own,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _served_part(part: ServedPart) -> worker_pb2.ServedPart:
    return worker_pb2.ServedPart(
        serving=_SERVING_MESSAGE[part.serving],
        live_tokens=part.live_tokens,
        reused_tokens=part.reused_tokens,
        tier=part.tier,
        reason=part.reason,
        captured_tokens=part.captured_tokens,
        source=part.source,
        fetch_seconds=part.fetch_seconds,
        refreshed_tokens=part.refreshed_tokens,
    )
