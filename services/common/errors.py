"""The root of every service's error tree, and its one mapping to gRPC status codes.

HypicError
├── InvalidRequestError    the caller must change the request
├── NotFoundError          the named thing does not exist
├── OverloadedError        try again later
├── UnavailableError       a service or worker that is needed cannot be reached
├── DeadlineError          the time allowed ran out
├── ConflictError          the state of the other side forbids it (a stale fence, a dropped state)
└── InternalError          a fault of ours
"""

import grpc

__all__ = [
    "ConflictError",
    "DeadlineError",
    "HypicError",
    "InternalError",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "UnavailableError",
    "error_from_code",
    "error_from_status",
    "status_code",
]


class HypicError(Exception):
    """An error with a message fit for the caller's eyes."""

    status: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class InvalidRequestError(HypicError):
    """The request can never succeed as it is; the message names the field and the remedy."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(HypicError):
    """The named thing does not exist."""

    status = grpc.StatusCode.NOT_FOUND


class OverloadedError(HypicError):
    """No room now; the same request may succeed later."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(HypicError):
    """A needed peer cannot be reached or is draining."""

    status = grpc.StatusCode.UNAVAILABLE


class DeadlineError(HypicError):
    """The time allowed for the call ran out."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class ConflictError(HypicError):
    """The state of the other side forbids the call."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class InternalError(HypicError):
    """A fault of ours."""

    status = grpc.StatusCode.INTERNAL


_BY_STATUS: dict[grpc.StatusCode, type[HypicError]] = {
    kind.status: kind
    for kind in (
        InvalidRequestError,
        NotFoundError,
        OverloadedError,
        UnavailableError,
        DeadlineError,
        ConflictError,
        InternalError,
    )
}


_BY_CODE: dict[int, type[HypicError]] = {int(status.value[0]): kind for status, kind in _BY_STATUS.items()}


def error_from_status(error: grpc.aio.AioRpcError) -> HypicError:
    """The error that the peer raised, from the status that came over the wire."""
    kind = _BY_STATUS.get(error.code(), InternalError)
    return kind(error.details() or error.code().name.lower())


def status_code(error: HypicError) -> int:
    """The number of an error's status, for messages within a stream that goes on."""
    return int(error.status.value[0])


def error_from_code(code: int, message: str) -> HypicError:
    """The error that `status_code` gave the number of."""
    return _BY_CODE.get(code, InternalError)(message)
