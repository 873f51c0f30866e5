"""The one place where messages become domain values, and domain values and errors become messages."""

from collections.abc import Iterable, Mapping

from hypic.v1 import cache_pb2 as pb

from services.cache.domain.cache import CopyOrder, NamedDocument, PartEntry, PlanRequest, PublishResult, ResidentCopy
from services.cache.domain.errors import (
    CacheError,
    DirectoryUnavailableError,
    IntegrityError,
    InvalidOrderError,
    PinLimitError,
    StaleEpochsError,
    UnknownLeaseError,
    UnknownWorkerError,
)
from services.cache.domain.evictions import Eviction
from services.cache.domain.orders import PlannedEntry, PlanReply, PublishOrder
from services.cache.domain.values import EntryKind, Holder, Namespace, PlanOutcome, PublishOutcome
from services.cache.domain.workers import WorkerRecord
from services.common.errors import (
    ConflictError,
    HypicError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    status_code,
)

__all__ = [
    "ENTRY_KINDS",
    "copy_order",
    "evictions_message",
    "holder_message",
    "plan_failure",
    "plan_message",
    "plan_request",
    "publish_message",
    "publish_order",
    "resident_copies",
    "wire_error",
    "worker_record",
    "workers_message",
]

_KINDS: Mapping[pb.EntryKind.ValueType, EntryKind] = {
    pb.ENTRY_KIND_SEGMENT: EntryKind.SEGMENT,
    pb.ENTRY_KIND_PREFIX: EntryKind.PREFIX,
}
ENTRY_KINDS: Mapping[EntryKind, pb.EntryKind.ValueType] = {kind: value for value, kind in _KINDS.items()}
_PLAN_OUTCOMES: Mapping[PlanOutcome, pb.PlanOutcome.ValueType] = {
    PlanOutcome.HIT: pb.PLAN_OUTCOME_HIT,
    PlanOutcome.COLD: pb.PLAN_OUTCOME_COLD,
    PlanOutcome.PENDING: pb.PLAN_OUTCOME_PENDING,
    PlanOutcome.LIVE: pb.PLAN_OUTCOME_LIVE,
    PlanOutcome.SUPERSEDED: pb.PLAN_OUTCOME_SUPERSEDED,
}
_PUBLISH_OUTCOMES: Mapping[PublishOutcome, pb.PublishOutcome.ValueType] = {
    PublishOutcome.ACCEPTED: pb.PUBLISH_OUTCOME_ACCEPTED,
    PublishOutcome.FENCED: pb.PUBLISH_OUTCOME_FENCED,
    PublishOutcome.OVER_BUDGET: pb.PUBLISH_OUTCOME_OVER_BUDGET,
    PublishOutcome.INVALIDATED: pb.PUBLISH_OUTCOME_INVALIDATED,
}
_WIRE_ERRORS: Mapping[type[CacheError], type[HypicError]] = {
    InvalidOrderError: InvalidRequestError,
    PinLimitError: ConflictError,
    UnknownLeaseError: NotFoundError,
    UnknownWorkerError: ConflictError,
    StaleEpochsError: OverloadedError,
    DirectoryUnavailableError: UnavailableError,
    IntegrityError: InternalError,
}


def wire_error(error: CacheError) -> HypicError:
    """The error that crosses the wire, with the same message."""
    return _WIRE_ERRORS.get(type(error), InternalError)(str(error))


def plan_request(message: pb.PlanRequest) -> PlanRequest:
    """Raises `InvalidOrderError` for an entry without a kind."""
    return PlanRequest(
        namespace=Namespace(message.namespace.tenant, message.namespace.salt, message.namespace.budget_bytes),
        model=message.model,
        profile_digest=message.profile_digest,
        entries=tuple([_part_entry(index, entry) for index, entry in enumerate(message.entries)]),
        lease_seconds=message.lease_seconds,
        lease_id=message.lease_id,
        admit_all=message.admit_all,
    )


def _part_entry(index: int, message: pb.PlanEntry) -> PartEntry:
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidOrderError(f"entries[{index}].kind: must be segment or prefix")
    documents = tuple([NamedDocument(each.id, each.digest) for each in message.documents])
    return PartEntry(kind, message.content_hash, message.num_tokens, documents)


def plan_message(call: int, reply: PlanReply) -> pb.PlanResponse:
    """The response to one plan of a stream."""
    entries = [_planned_message(entry) for entry in reply.entries]
    return pb.PlanResponse(lease_id=reply.lease_id, entries=entries, call=call)


def plan_failure(call: int, error: HypicError) -> pb.PlanResponse:
    """The response to one plan of a stream that was not made."""
    return pb.PlanResponse(call=call, failure=pb.CallFailure(status=status_code(error), message=str(error)))


def _planned_message(entry: PlannedEntry) -> pb.PlannedEntry:
    message = pb.PlannedEntry(
        outcome=_PLAN_OUTCOMES[entry.outcome],
        key=entry.key,
        holders=map(holder_message, entry.holders),
        owner_expires_in_seconds=entry.owner_expires_in_seconds,
    )
    if entry.ticket:
        message.ticket.ticket_id = entry.ticket.ticket_id
        message.ticket.fence = entry.ticket.fence
        message.ticket.expires_in_seconds = entry.ticket.expires_in_seconds
    return message


def holder_message(holder: Holder) -> pb.Holder:
    """A worker that holds a copy."""
    return pb.Holder(worker_id=holder.worker_id, address=holder.address, tier=holder.tier)


def publish_order(message: pb.PublishRequest) -> PublishOrder:
    """The order of a `Publish`."""
    return PublishOrder(
        key=message.key,
        ticket_id=message.ticket_id,
        fence=message.fence,
        worker_id=message.worker_id,
        tier=message.tier,
        size_bytes=message.size_bytes,
    )


def copy_order(message: pb.PublishCopyRequest) -> CopyOrder:
    """The order of a `PublishCopy`."""
    return CopyOrder(message.key, message.worker_id, message.tier, message.holder_id, message.holder_receipt)


def publish_message(result: PublishResult) -> pb.PublishResponse:
    """The response to `Publish`."""
    return pb.PublishResponse(
        outcome=_PUBLISH_OUTCOMES[result.outcome], drop_keys=result.drop_keys, receipt=result.receipt
    )


def resident_copies(message: pb.HeartbeatRequest) -> list[ResidentCopy]:
    """The published copies that a worker lists. Their description comes from the receipts, not from the worker."""
    return [ResidentCopy(entry.key, entry.tier, entry.receipt) for entry in message.resident]


def worker_record(message: pb.HeartbeatRequest) -> WorkerRecord:
    """What a heartbeat says of its worker, for others to read."""
    description = pb.RegisteredWorker(
        worker_id=message.worker_id,
        address=message.address,
        model=message.model,
        profile_digest=message.profile_digest,
        roles=message.roles,
        load=message.load,
        speeds=message.speeds,
        draining=message.draining,
    )
    return WorkerRecord(message.worker_id, message.address, description.SerializeToString())


def workers_message(workers: Iterable[WorkerRecord]) -> pb.ListWorkersResponse:
    """The response to `ListWorkers`."""
    return pb.ListWorkersResponse(workers=[pb.RegisteredWorker.FromString(worker.description) for worker in workers])


def evictions_message(rows: Iterable[Eviction]) -> pb.ListEvictionsResponse:
    """The response to `ListEvictions`."""
    return pb.ListEvictionsResponse(
        evictions=[
            pb.Eviction(
                evictor=row.evictor,
                victim=row.victim,
                num_entries=row.num_entries,
                size_bytes=row.size_bytes,
                num_tokens=row.num_tokens,
            )
            for row in rows
        ]
    )
