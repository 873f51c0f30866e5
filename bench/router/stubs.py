"""`python -m bench.router.stubs`: a worker that computes nothing and a cache service in which everything is stored.

Both answer at once, so that whatever a first token takes is the router's. Further tokens come one a step, as they do of an
engine: what many replies have at a time goes in one message, what one reply has later in another.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from pathlib import Path

import grpc
import uvloop
from hypic.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from tokenizers import Tokenizer

from services.common.rpc import HealthSwitch, create_server
from services.worker.adapters.generate_streams import GenerateStreams

__all__ = ["MODEL_NAME", "InstantCache", "InstantWorker", "serve"]

MODEL_NAME = "instant"
_CHECKPOINT = Path(__file__).resolve().parent.parent.parent / "models" / "demo"
_WORKER_ID = "instant-0"
_SEAM_WINDOW = 32
_MIN_BODY = 16
# A worker has measured itself after its first requests.
_SPEEDS = cache_pb2.WorkerSpeeds(capture_pass_tokens=4096, capture_token_seconds=1e-6, combine_token_seconds=1e-6)
_STEP_SECONDS = 0.005
_REPLY = " The bridge was opened by the people of the old harbour town in winter."


class InstantWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Speaks the demo model's tokenizer; replies with the same ids, one a message, as many as were asked for."""

    def __init__(self) -> None:
        tokenizer_json = (_CHECKPOINT / "tokenizer.json").read_text()
        config = json.loads((_CHECKPOINT / "tokenizer_config.json").read_text())
        self._tokenizer_json = tokenizer_json.encode()
        tokenizer = Tokenizer.from_str(tokenizer_json)
        self._reply = [
            worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=[each]))
            for each in tokenizer.encode(_REPLY, add_special_tokens=False).ids
        ]
        self._info = worker_pb2.WorkerInfo(
            worker_id=_WORKER_ID,
            model_name=MODEL_NAME,
            model_revision="1",
            profile=worker_pb2.Profile(
                digest="profile",
                min_segment_tokens=_SEAM_WINDOW + _MIN_BODY,
                min_body=_MIN_BODY,
                document_open="<|document_start|>",
                document_close="<|document_end|>",
            ),
            chat_template=config["chat_template"],
            context_length=int(config["model_max_length"]),
            stop_token_ids=tokenizer.encode(config["eos_token"], add_special_tokens=False).ids,
            eos_token=config["eos_token"],
            can_capture=True,
            can_combine=True,
            moves_states=True,
        )

    async def Describe(  # noqa: N802
        self,
        request: worker_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DescribeRequest, worker_pb2.DescribeResponse],
    ) -> AsyncGenerator[worker_pb2.DescribeResponse]:
        """What is served."""
        yield worker_pb2.DescribeResponse(info=self._info)
        yield worker_pb2.DescribeResponse(tokenizer_chunk=self._tokenizer_json)

    async def Report(  # noqa: N802
        self,
        request: worker_pb2.ReportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReportRequest, worker_pb2.ReportResponse],
    ) -> worker_pb2.ReportResponse:
        """Never busy, and as fast as it can say."""
        return worker_pb2.ReportResponse(speeds=_SPEEDS)

    async def Generate(  # noqa: N802
        self,
        request_iterator: AsyncIterable[worker_pb2.GenerateOrders],
        context: grpc.aio.ServicerContext[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents],
    ) -> AsyncGenerator[worker_pb2.GenerateEvents]:
        """Everything is held, and no prompt takes time."""
        async with aclosing(GenerateStreams(self._reply_to).serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def _reply_to(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateEvent]:
        yield worker_pb2.GenerateEvent(prefilled=worker_pb2.Prefilled(parts=[_serve(part) for part in request.parts]))
        count = request.sampling.max_tokens
        for index in range(count):
            if index:
                await _next_step()
            yield self._token(index, request.sampling)
        finished = worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_LENGTH, generated_tokens=count)
        yield worker_pb2.GenerateEvent(finished=finished)

    def _token(self, index: int, sampling: worker_pb2.Sampling) -> worker_pb2.GenerateEvent:
        event = self._reply[index % len(self._reply)]
        if not sampling.HasField("logprobs"):
            return event
        # The router looks at a share of its composed answers again.
        told = worker_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=event.tokens.token_ids, top_logprobs=[-0.5])
        return worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=event.tokens.token_ids, logprobs=[told]))


async def _next_step() -> None:
    """All replies have their next tokens at the same time, as those of one batch do."""
    await asyncio.sleep(_STEP_SECONDS - time.monotonic() % _STEP_SECONDS)


def _serve(part: worker_pb2.PromptPart) -> worker_pb2.ServedPart:
    length = len(part.token_ids)
    if part.serving == worker_pb2.PART_SERVING_SEGMENT:
        reused = length - _SEAM_WINDOW
        return worker_pb2.ServedPart(
            serving=part.serving, live_tokens=_SEAM_WINDOW, reused_tokens=reused, tier="device"
        )
    reused = length if part.serving == worker_pb2.PART_SERVING_PREFIX else 0
    return worker_pb2.ServedPart(serving=part.serving, live_tokens=length - reused, reused_tokens=reused)


class InstantCache(cache_pb2_grpc.CacheServiceServicer):
    """Every state is held by the one worker."""

    def __init__(self) -> None:
        self._num_leases = 0
        self._holder = cache_pb2.Holder(worker_id=_WORKER_ID, tier="device")

    async def Plan(  # noqa: N802
        self,
        request_iterator: AsyncIterable[cache_pb2.PlanRequest],
        context: grpc.aio.ServicerContext[cache_pb2.PlanRequest, cache_pb2.PlanResponse],
    ) -> AsyncGenerator[cache_pb2.PlanResponse]:
        """A lease, and a hit for each entry."""
        async for request in request_iterator:
            self._num_leases += 1
            entries = [
                cache_pb2.PlannedEntry(
                    outcome=cache_pb2.PLAN_OUTCOME_HIT, key=each.content_hash, holders=[self._holder]
                )
                for each in request.entries
            ]
            lease_id = request.lease_id or f"lease-{self._num_leases}"
            yield cache_pb2.PlanResponse(lease_id=lease_id, entries=entries, call=request.call)

    async def Release(  # noqa: N802
        self,
        request: cache_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ReleaseRequest, cache_pb2.ReleaseResponse],
    ) -> cache_pb2.ReleaseResponse:
        """Nothing is kept of a lease."""
        return cache_pb2.ReleaseResponse()


async def serve() -> None:
    """Print the worker's and the cache service's port, and answer until the process is ended."""
    # What a router never calls here is left out.
    worker, cache = InstantWorker(), InstantCache()  # type: ignore[abstract]
    _worker_server, worker_port = await create_server(
        [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    cache_server, cache_port = await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    print(worker_port, cache_port, flush=True)
    await cache_server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
