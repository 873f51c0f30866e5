"""Commands as bytes, between processes of one host: a JSON head, then the token ids that it counts, 4 bytes each."""

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from services.worker.engine.commands import Cancel, Command, Drop, Rename, Submit, SubmitCapture
from services.worker.engine.refresh import RefreshOrder, SweepCost
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PromptPart,
    Serving,
    SnapshotOrder,
    TurnHold,
)
from services.worker.engine.sampling import SamplingOptions

__all__ = ["decode", "encode"]

_LENGTH = struct.Struct("<I")
_TOKEN = "i"


def encode(command: Command) -> bytes:
    """All of a command but its sink, which is the leader's."""
    head, runs = _take_apart(command)
    tokens = array(_TOKEN, [token for run in runs for token in run])
    said = json.dumps({**head, "lengths": [len(run) for run in runs]}).encode()
    return _LENGTH.pack(len(said)) + said + tokens.tobytes()


def decode(data: bytes) -> Command:
    """The command, whose events nobody hears."""
    (size,) = _LENGTH.unpack_from(data)
    head: dict[str, Any] = json.loads(data[_LENGTH.size : _LENGTH.size + size])
    tokens = array(_TOKEN)
    tokens.frombytes(data[_LENGTH.size + size :])
    return _put_together(head, _cut(tokens.tolist(), head["lengths"]))


def _take_apart(command: Command) -> tuple[dict[str, Any], Sequence[Sequence[int]]]:
    match command:
        case Submit(request):
            sampling = {**asdict(request.sampling), "stop_ids": sorted(request.sampling.stop_ids)}
            head: dict[str, Any] = {
                "kind": "submit",
                "id": request.request_id,
                "parts": [[part.serving, part.key.hex(), part.captures] for part in request.parts],
                "sampling": sampling,
                "prefix": request.prefix_key.hex(),
                "priority": request.priority,
                "tenant": request.tenant.hex(),
                "refresh": None if request.refresh is None else asdict(request.refresh),
                "snapshots": [[order.key.hex(), order.after_part] for order in request.snapshots],
                "turn": None if request.turn is None else [request.turn.key.hex(), request.turn.closing_ids],
            }
            return head, [part.token_ids for part in request.parts]
        case SubmitCapture(job):
            keys = [segment.key.hex() for segment in job.segments]
            head = {"kind": "capture", "id": job.request_id, "keys": keys, "background": job.background}
            return head, [segment.token_ids for segment in job.segments]
        case Cancel(request_id):
            return {"kind": "cancel", "id": request_id}, []
        case Drop(keys):
            return {"kind": "drop", "keys": [key.hex() for key in keys]}, []
        case Rename(key, new_key):
            return {"kind": "rename", "keys": [key.hex(), new_key.hex()]}, []


def _put_together(head: dict[str, Any], runs: Iterator[tuple[int, ...]]) -> Command:
    match head["kind"]:
        case "submit":
            sampling = {
                **head["sampling"],
                "stop_ids": frozenset(head["sampling"]["stop_ids"]),
                "logit_bias": tuple(map(tuple, head["sampling"]["logit_bias"])),
            }
            request = GenerateRequest(
                request_id=head["id"],
                parts=tuple(
                    PromptPart(ids, Serving(serving), bytes.fromhex(key), captures)
                    for ids, (serving, key, captures) in zip(runs, head["parts"], strict=True)
                ),
                sampling=SamplingOptions(**sampling),
                sink=_hear_nothing,
                prefix_key=bytes.fromhex(head["prefix"]),
                snapshots=tuple(SnapshotOrder(bytes.fromhex(key), after) for key, after in head["snapshots"]),
                priority=head["priority"],
                tenant=bytes.fromhex(head["tenant"]),
                refresh=_refresh(head["refresh"]),
                turn=_turn(head["turn"]),
            )
            return Submit(request)
        case "capture":
            segments = tuple(
                CaptureSegment(bytes.fromhex(key), ids) for ids, key in zip(runs, head["keys"], strict=True)
            )
            return SubmitCapture(CaptureJob(head["id"], segments, _hear_nothing, head["background"]))
        case "cancel":
            return Cancel(head["id"])
        case "drop":
            return Drop(tuple(bytes.fromhex(key) for key in head["keys"]))
        case "rename":
            return Rename(*map(bytes.fromhex, head["keys"]))
    raise ValueError(f"{head['kind']} is no command")


def _refresh(said: dict[str, Any] | None) -> RefreshOrder | None:
    if said is None:
        return None
    return RefreshOrder(**{**said, "cost": None if said["cost"] is None else SweepCost(**said["cost"])})


def _turn(said: tuple[str, Sequence[int]] | None) -> TurnHold | None:
    return None if said is None else TurnHold(bytes.fromhex(said[0]), tuple(said[1]))


def _cut(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    for length in lengths:
        yield tuple(tokens[start : start + length])
        start += length


def _hear_nothing(_event: GenerateEvent | CaptureEvent) -> None:
    """Only the leader's events are heard."""
