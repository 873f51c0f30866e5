"""Protobuf messages to domain types and back."""

from functools import lru_cache

from blake3 import blake3
from hypic.v1 import cache_pb2, worker_pb2

from services.common.tracing import trace_parent
from services.router.domain.combine_choice import Holding
from services.router.domain.model import ModelInfo, Profile
from services.router.domain.parts import Reason
from services.router.domain.plan import CacheEntry, EntryKind, Outcome, Served, Ticket
from services.router.domain.ports import (
    CaptureBatch,
    CaptureResult,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateOrder,
    Held,
    HoldEvent,
    PartOrder,
    PartServing,
    PlanAnswer,
    PlanQuery,
    Prefilled,
    Released,
    ServedPart,
    TokenLogprobs,
    Tokens,
)
from services.router.domain.request import Namespace, Refresh, Sampling
from services.router.domain.unmeasured import UNMEASURED
from services.router.domain.workers import CaptureSpeed, CombineSpeed, Role, TransferSpeed, WorkerSpeeds

__all__ = [
    "capture_request",
    "capture_result",
    "generate_event",
    "hold_event",
    "keep_request",
    "model_info",
    "namespace_message",
    "plan_answer",
    "plan_request",
    "roles",
    "worker_speeds",
    "write_generate_request",
    "write_hold_request",
]

_ENTRY_KINDS = {EntryKind.SEGMENT: cache_pb2.ENTRY_KIND_SEGMENT, EntryKind.PREFIX: cache_pb2.ENTRY_KIND_PREFIX}
_OUTCOMES = {
    cache_pb2.PLAN_OUTCOME_HIT: Served.HIT,
    cache_pb2.PLAN_OUTCOME_COLD: Served.COLD,
    cache_pb2.PLAN_OUTCOME_PENDING: Served.PENDING,
    cache_pb2.PLAN_OUTCOME_LIVE: Served.LIVE,
    cache_pb2.PLAN_OUTCOME_SUPERSEDED: Served.LIVE,
}
_LIVE_REASONS = {
    cache_pb2.PLAN_OUTCOME_LIVE: Reason.FIRST_USE,
    cache_pb2.PLAN_OUTCOME_SUPERSEDED: Reason.SUPERSEDED,
}
_SERVINGS = {
    PartServing.LIVE: worker_pb2.PART_SERVING_LIVE,
    PartServing.SEGMENT: worker_pb2.PART_SERVING_SEGMENT,
    PartServing.PREFIX: worker_pb2.PART_SERVING_PREFIX,
}
_SERVING_NAMES = {value: name for name, value in _SERVINGS.items()}
# How many parts' ids are kept as written, and how many ids of one: some 40 MB at most.
_KEPT_PARTS = 2048
_MOST_KEPT_IDS = 2048
_FINISH_REASONS = {
    worker_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    worker_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def plan_request(query: PlanQuery) -> cache_pb2.PlanRequest:
    """The message of a plan query."""
    return cache_pb2.PlanRequest(
        request_id=query.request_id,
        namespace=namespace_message(query.namespace),
        model=query.model,
        profile_digest=query.profile_digest,
        entries=map(_plan_entry, query.entries),
        lease_seconds=query.lease_seconds,
        lease_id=query.lease_id,
        admit_all=query.admit_all,
        traceparent=trace_parent(),
    )


def namespace_message(namespace: Namespace) -> cache_pb2.Namespace:
    """For whom a call is made."""
    return cache_pb2.Namespace(tenant=namespace.tenant, salt=namespace.salt, budget_bytes=namespace.budget_bytes)


def _plan_entry(entry: CacheEntry) -> cache_pb2.PlanEntry:
    return cache_pb2.PlanEntry(
        kind=_ENTRY_KINDS[entry.kind],
        content_hash=entry.content_hash,
        num_tokens=entry.num_tokens,
        documents=[cache_pb2.DocumentRef(id=each.document_id, digest=each.digest) for each in entry.documents],
    )


def plan_answer(query: PlanQuery, response: cache_pb2.PlanResponse) -> PlanAnswer:
    """The directory's answer, one outcome for each of the query's entries.

    Raises:
        KeyError: an outcome that this version does not know.
        ValueError: another number of entries than was asked for.
    """
    if len(response.entries) != len(query.entries):
        raise ValueError(f"{len(response.entries)} entries for {len(query.entries)}")
    return PlanAnswer(response.lease_id, tuple(map(_outcome, response.entries)))


def _outcome(entry: cache_pb2.PlannedEntry) -> Outcome:
    return Outcome(
        served=_OUTCOMES[entry.outcome],
        key=entry.key,
        tier=entry.holders[0].tier if entry.holders else "",
        holders=tuple(Holding(holder.worker_id, holder.tier) for holder in entry.holders),
        ticket=Ticket(entry.ticket.ticket_id, entry.ticket.fence) if entry.HasField("ticket") else None,
        owner_seconds=entry.owner_expires_in_seconds,
        reason=_LIVE_REASONS.get(entry.outcome),
    )


def model_info(info: worker_pb2.WorkerInfo) -> ModelInfo:
    """What a worker's description says of the model."""
    return ModelInfo(
        name=info.model_name,
        revision=info.model_revision,
        profile=Profile(
            digest=info.profile.digest,
            min_segment_tokens=info.profile.min_segment_tokens,
            min_body=info.profile.min_body,
            document_open=info.profile.document_open,
            document_close=info.profile.document_close,
        ),
        chat_template=info.chat_template,
        context_length=info.context_length,
        stop_token_ids=tuple(info.stop_token_ids),
        bos_token=info.bos_token,
        eos_token=info.eos_token,
        state_bytes=info.state_bytes,
        state_token_bytes=info.state_token_bytes,
        num_layers=max(1, info.num_layers),
        vocab_size=info.vocab_size,
    )


def roles(info: worker_pb2.WorkerInfo) -> frozenset[Role]:
    """What a worker's description says that it does."""
    has = {Role.PREFILL: info.can_capture, Role.COMBINE: info.can_combine}
    return frozenset(role for role, is_own in has.items() if is_own)


def worker_speeds(speeds: cache_pb2.WorkerSpeeds) -> WorkerSpeeds:
    """A worker's speeds; 0 where nothing has been measured, and no way where none has."""
    ways = {
        way.source: TransferSpeed(way.latency_seconds, way.bytes_per_second)
        for way in speeds.transfers
        if way.bytes_per_second > 0
    }
    return WorkerSpeeds(
        capture=CaptureSpeed(speeds.capture_pass_seconds, speeds.capture_token_seconds, speeds.capture_pass_tokens),
        combine=CombineSpeed(speeds.combine_pass_seconds, 0.0, speeds.combine_token_seconds),
        same_host=ways.pop("same_host", UNMEASURED.same_host),
        other_host=ways.pop("other_host", UNMEASURED.other_host),
        tiers=ways,
    )


def capture_request(request_id: str, batch: CaptureBatch) -> worker_pb2.CaptureRequest:
    """The message that orders captures."""
    return worker_pb2.CaptureRequest(
        request_id=request_id,
        background=batch.is_background,
        segments=[
            worker_pb2.CaptureSegment(key=order.key, token_ids=order.token_ids, ticket=_ticket_ref(order.ticket))
            for order in batch.orders
        ],
    )


def capture_result(event: worker_pb2.CaptureEvent) -> CaptureResult:
    """How one capture ended."""
    return CaptureResult(event.key, event.outcome == worker_pb2.CAPTURE_OUTCOME_STORED, event.reason)


def _ticket_ref(ticket: Ticket) -> worker_pb2.TicketRef:
    return worker_pb2.TicketRef(ticket_id=ticket.ticket_id, fence=ticket.fence)


@lru_cache(maxsize=4096)
def _tenant_mark(tenant: str) -> bytes:
    """What workers tell tenants apart by."""
    return blake3(tenant.encode()).digest(length=8)


def write_generate_request(order: GenerateOrder, message: worker_pb2.GenerateRequest) -> None:
    """Fill in the message that orders a reply, in its place: what is handed over made is copied."""
    message.request_id = order.request_id
    message.lease_id = order.lease_id
    message.prefix_key = order.prefix_key
    message.priority = order.priority
    message.tenant = _tenant_mark(order.tenant)
    message.closing_token_ids.extend(order.closing_ids)
    _write_sampling(order.sampling, order.stop_token_ids, message.sampling)
    if order.sampling.grammar is not None:
        setattr(message.grammar, order.sampling.grammar.kind.value, order.sampling.grammar.source)
    for each in order.snapshots:
        message.snapshots.add(key=each.key, after_part=each.after_part, ticket=_ticket_ref(each.ticket))
    _write_refresh(order.refresh, message)
    for part in order.parts:
        _add_part(message, part)


def _add_part(message: worker_pb2.GenerateRequest, part: PartOrder) -> None:
    added = message.parts.add(serving=_SERVINGS[part.serving], key=part.key)
    if part.ticket is not None:
        added.capture.CopyFrom(_ticket_ref(part.ticket))
    if part.source_wait_seconds:
        added.source_wait_seconds = part.source_wait_seconds
    for each in part.sources:
        added.sources.add(worker_id=each.worker_id, address=each.address)
    if part.serving is PartServing.LIVE or len(part.token_ids) > _MOST_KEPT_IDS:
        added.token_ids.extend(part.token_ids)
    else:
        added.MergeFromString(_written_ids(part.token_ids))


@lru_cache(_KEPT_PARTS)
def _written_ids(token_ids: tuple[int, ...]) -> bytes:
    """A part's ids as they go over the wire: those of a document are the same again and again."""
    return worker_pb2.PromptPart(token_ids=token_ids).SerializeToString()


def write_hold_request(order: GenerateOrder, message: worker_pb2.GenerateRequest) -> None:
    """Fill in the message that orders a decode state."""
    write_generate_request(order, message)
    message.hold.SetInParent()


def _write_refresh(refresh: Refresh, message: worker_pb2.GenerateRequest) -> None:
    if refresh.is_none:
        return
    if refresh.blocks is None:
        message.refresh.budget_seconds = refresh.budget_seconds or 0.0
    else:
        message.refresh.blocks = refresh.blocks


def keep_request(held_key: bytes, key: bytes, ticket: Ticket) -> worker_pb2.KeepRequest:
    """The message that keeps a held state."""
    return worker_pb2.KeepRequest(held_key=held_key, key=key, ticket=_ticket_ref(ticket))


def _write_sampling(sampling: Sampling, stop_token_ids: tuple[int, ...], message: worker_pb2.Sampling) -> None:
    message.temperature = sampling.temperature
    message.top_p = sampling.top_p
    message.top_k = sampling.top_k
    message.max_tokens = sampling.max_tokens or 0
    message.stop_token_ids.extend(stop_token_ids)
    message.min_p = sampling.min_p
    message.presence_penalty = sampling.presence_penalty
    message.frequency_penalty = sampling.frequency_penalty
    message.repetition_penalty = sampling.repetition_penalty
    message.min_tokens = sampling.min_tokens
    for token, bias in sampling.logit_bias:
        message.logit_bias.add(token_id=token, bias=bias)
    if sampling.seed is not None:
        message.seed = sampling.seed
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs


def generate_event(event: worker_pb2.GenerateEvent) -> GenerateEvent:
    """One event of a reply. Raises KeyError on a value that this version does not know."""
    kind = event.WhichOneof("event")
    if kind == "prefilled":
        parts = tuple(_served_part(part) for part in event.prefilled.parts)
        prefilled = event.prefilled
        return Prefilled(parts, prefilled.queue_seconds, prefilled.fetch_seconds, prefilled.combine_seconds)
    if kind == "tokens":
        return Tokens(tuple(event.tokens.token_ids), tuple(map(_token_logprobs, event.tokens.logprobs)))
    finished = event.finished
    reason = _FINISH_REASONS[finished.reason]
    return Finished(reason, finished.decode_seconds, finished.generated_tokens, finished.held_key)


def hold_event(event: worker_pb2.GenerateEvent) -> HoldEvent:
    """One event of a hold. Raises KeyError or ValueError on what this version does not know."""
    kind = event.WhichOneof("event")
    if kind == "held":
        return Held(event.held.handle, event.held.num_tokens)
    if kind == "released":
        return Released(event.released.taken)
    found = generate_event(event)
    if not isinstance(found, Prefilled):
        raise ValueError(f"{kind} stands in a hold")
    return found


def _token_logprobs(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))


def _served_part(part: worker_pb2.ServedPart) -> ServedPart:
    return ServedPart(
        serving=_SERVING_NAMES[part.serving],
        live_tokens=part.live_tokens,
        reused_tokens=part.reused_tokens,
        tier=part.tier,
        reason=part.reason,
        captured_tokens=part.captured_tokens,
        source=part.source,
        fetch_seconds=part.fetch_seconds,
        refreshed_tokens=part.refreshed_tokens,
    )
