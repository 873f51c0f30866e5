"""Workers as scheduling sees them: what they may do, how fast they are, and how long until they are free.

Speeds are measured ones. Seconds count from now, the moment of the decision.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "BOTH_ROLES",
    "CaptureSpeed",
    "CombineSpeed",
    "Role",
    "TransferSpeed",
    "WorkerSpeeds",
    "WorkerView",
    "with_role",
]


class Role(StrEnum):
    """`prefill` workers capture, `combine` workers combine and decode; a worker may do both."""

    PREFILL = "prefill"
    COMBINE = "combine"


BOTH_ROLES = frozenset(Role)


@dataclass(frozen=True, slots=True)
class CaptureSpeed:
    """Seconds of captures: of every pass over the weights, and of every token; a pass takes up to `pass_tokens` tokens.

    Segments that wait together share passes.
    """

    pass_seconds: float
    token_seconds: float
    pass_tokens: int

    def seconds(self, num_tokens: int) -> float:
        """Of so many tokens that wait together."""
        return math.ceil(num_tokens / self.pass_tokens) * self.pass_seconds + num_tokens * self.token_seconds


@dataclass(frozen=True, slots=True)
class CombineSpeed:
    """Seconds of a combine: of the pass, of every composed segment, of every live token.

    running_seconds: what each running request adds, by the decode steps that come in between.
    """

    pass_seconds: float
    segment_seconds: float
    token_seconds: float
    running_seconds: float = 0.0

    def seconds(self, num_segments: int, live_tokens: int) -> float:
        """Of one prompt, on a worker where nothing else runs."""
        return self.pass_seconds + num_segments * self.segment_seconds + live_tokens * self.token_seconds


@dataclass(frozen=True, slots=True)
class TransferSpeed:
    """A way for the bytes of states. The default costs nothing.

    num_pieces: in how many equal pieces a state goes while it is being computed, layer by layer; 1 sends it when it is whole.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = math.inf
    num_pieces: int = 1

    def seconds(self, num_bytes: int) -> float:
        """Of a state that is there already."""
        return self.latency_seconds + num_bytes / self.bytes_per_second if num_bytes else 0.0

    def arrival(self, start: float, finish: float, num_bytes: int) -> float:
        """When the last byte is there of a state that is computed evenly from `start` to `finish`."""
        if not num_bytes:
            return finish
        sending = num_bytes / self.bytes_per_second
        first_piece = start + (finish - start) / self.num_pieces
        return self.latency_seconds + max(finish + sending / self.num_pieces, first_piece + sending)


FREE = TransferSpeed()


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """Of one worker; transfers are pulls, so `same_host`, `other_host` and its own lower `tiers` are what it reads with.

    A tier that is not named costs nothing: it is the memory that passes read.
    """

    capture: CaptureSpeed
    combine: CombineSpeed
    same_host: TransferSpeed = FREE
    other_host: TransferSpeed = FREE
    tiers: Mapping[str, TransferSpeed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker at the moment of a decision.

    backlog_seconds: until what it has accepted is captured and combined, by its own speeds; is_draining: it ends what it
    has and takes nothing new, though others may read from it.
    """

    worker_id: str
    speeds: WorkerSpeeds
    roles: frozenset[Role] = BOTH_ROLES
    host: str = ""
    backlog_seconds: float = 0.0
    running_requests: int = 0
    is_draining: bool = False

    def accepts(self, role: Role) -> bool:
        """Whether new work of this kind may go there."""
        return role in self.roles and not self.is_draining

    def transfer_from(self, source: "WorkerView") -> TransferSpeed:
        """How this worker reads what another one holds."""
        if source.worker_id == self.worker_id:
            return FREE
        return self.speeds.same_host if source.host == self.host else self.speeds.other_host


def with_role(workers: Iterable[WorkerView], role: Role) -> list[WorkerView]:
    """Those that accept such work, by id."""
    return sorted((worker for worker in workers if worker.accepts(role)), key=lambda worker: worker.worker_id)
