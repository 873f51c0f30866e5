"""What a worker says of itself to the directory and to routers: its load, its measured speeds, whether it takes new work."""

from hypic.v1 import cache_pb2

from services.worker.adapters.engine_thread import EngineThread
from services.worker.engine.loop import Engine
from services.worker.tiers.speeds import FetchPolicy

__all__ = ["SelfReport"]


class SelfReport:
    """The load is as the last `refresh` found it: a reader never waits for a long step of the engine."""

    def __init__(self, engine: EngineThread, policy: FetchPolicy) -> None:
        self._engine = engine
        self._policy = policy
        self._capture_pass_tokens = 0
        self.load = cache_pb2.WorkerLoad()
        self.num_states = 0
        self.is_draining = False

    async def refresh(self) -> None:
        """Ask the engine."""
        await self._engine.call(self._read)

    def _read(self, engine: Engine) -> None:
        store = engine.context.store
        self._capture_pass_tokens = engine.limits.capture_tokens
        self.num_states = len(store)
        self.load = cache_pb2.WorkerLoad(
            num_requests_running=engine.num_running,
            num_requests_waiting=engine.num_waiting,
            state_bytes_used=store.used_bytes,
            state_bytes_capacity=store.capacity_bytes,
            capture_tokens_waiting=engine.capture_tokens_left,
        )

    @property
    def speeds(self) -> cache_pb2.WorkerSpeeds:
        """As measured so far; 0 is not measured yet."""
        captures, combines = self._policy.captures, self._policy.engine
        return cache_pb2.WorkerSpeeds(
            capture_pass_tokens=self._capture_pass_tokens,
            capture_pass_seconds=captures.pass_seconds,
            capture_token_seconds=captures.estimate(1) or 0.0,
            combine_pass_seconds=combines.pass_seconds,
            combine_token_seconds=combines.estimate(1) or 0.0,
            transfers=[
                cache_pb2.TransferSpeed(
                    source=source,
                    latency_seconds=speed.latency_seconds or 0.0,
                    bytes_per_second=speed.bytes_per_second or 0.0,
                )
                for source, speed in self._policy.tiers.items()
            ],
        )
