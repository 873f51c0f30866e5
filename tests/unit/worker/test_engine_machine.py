"""Any interleaving of requests, captures, cancellations, drops and steps: the books balance after each."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureSegment,
    EngineFullError,
    FetchEvent,
    PromptPart,
    SnapshotOrder,
)
from tests.exactness.rig import create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory
from tests.unit.worker.engine_rig import (
    Elsewhere,
    EngineRig,
    Heard,
    cold,
    create_profile,
    fetched,
    live,
    segment,
)

SEGMENTS = {bytes([65 + index]): draw_ids(length, index) for index, length in enumerate((5, 9, 33, 70))}
SNAPSHOT_KEYS = (b"p", b"q")
KEYS = st.sampled_from(sorted(SEGMENTS))


class EngineMachine(RuleBasedStateMachine):
    """Small pools, so that waiting and exhaustion happen; `step` is one layer of one pass."""

    directory: Path
    device: torch.device

    @initialize(
        prime_tokens=st.sampled_from([0, 5]),
        layer_tokens=st.sampled_from([1, 200]),
        sweep_tokens=st.sampled_from([1, 40, 2048]),
    )
    def start(self, prime_tokens: int, layer_tokens: int, sweep_tokens: int) -> None:
        context = create_context(self.directory, self.device, create_profile(prime_tokens), num_pages=24, num_slots=3)
        limits = EngineLimits(300, 4, 3, layer_tokens, capture_tokens=80, sweep_tokens=sweep_tokens)
        self.rig = EngineRig(context, limits)
        other = create_context(self.directory, self.device, create_profile(prime_tokens), num_pages=80, num_slots=3)
        self.elsewhere = Elsewhere.capture(EngineRig(other), SEGMENTS)
        self.heard: dict[str, Heard] = {}
        self.captures: dict[str, tuple[int, list[CaptureEvent]]] = {}
        self.silenced: dict[str, int] = {}
        self.ended: set[int] = set()

    @rule(
        keys=st.lists(KEYS, max_size=3),
        tail=st.integers(1, 40),
        tokens=st.integers(1, 20),
        keep=st.booleans(),
        part=st.sampled_from([segment, cold, fetched]),
    )
    def submit(
        self,
        keys: list[bytes],
        tail: int,
        tokens: int,
        keep: bool,
        part: Callable[[bytes, tuple[int, ...]], PromptPart],
    ) -> None:
        name = f"r{len(self.heard)}"
        parts: list[PromptPart] = [part(key, SEGMENTS[key]) for key in keys]
        orders = (SnapshotOrder(SNAPSHOT_KEYS[len(keys) % 2], len(keys)),) if keep and keys else ()
        try:
            self.heard[name] = self.rig.submit(name, *parts, live(tail, tail), max_tokens=tokens, snapshots=orders)
        except EngineFullError:
            assert self.rig.engine.num_waiting == self.rig.engine.limits.max_waiting

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3), background=st.booleans())
    def capture(self, keys: list[bytes], background: bool) -> None:
        name = f"c{len(self.captures)}"
        orders = [CaptureSegment(key, SEGMENTS[key]) for key in keys]
        self.captures[name] = (len(keys), self.rig.submit_capture(name, *orders, background=background))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        names = [*self.heard, *self.captures]
        if names:
            name = data.draw(st.sampled_from(names))
            self.rig.engine.cancel(name)
            self.silenced.setdefault(name, self._told(name))

    @rule(data=st.data(), layers=st.integers(0, 4), ends=st.booleans())
    def bring(self, data: st.DataObject, layers: int, ends: bool) -> None:
        """Some layers of a state that is to come; it ends whole, or fails where it has got to."""
        coming = self._coming()
        if coming:
            event = data.draw(st.sampled_from(coming))
            self.elsewhere.bring(event, layers)
            self.rig.engine.wake()
            if ends:
                self._end(event)

    def _coming(self) -> list[FetchEvent]:
        told = [event for heard in self.heard.values() for event in heard.fetches]
        return [event for event in told if id(event) not in self.ended]

    def _end(self, event: FetchEvent) -> None:
        self.ended.add(id(event))
        if event.incoming.is_present:
            self.rig.engine.finish_arrival(event.key, event.incoming)
        else:
            self.rig.engine.fail_arrival(event.key, event.incoming, "lost")

    @rule(key=st.one_of(KEYS, st.sampled_from(SNAPSHOT_KEYS)))
    def drop(self, key: bytes) -> None:
        was_there = key in self.rig.context.store
        assert self.rig.context.store.drop(key) == was_there

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()

    def teardown(self) -> None:
        """Without stored states everything finishes, everybody was answered once, and nothing is held."""
        if not hasattr(self, "rig"):
            return
        for _ in range(600):
            self.rig.drop_all([*SEGMENTS, *SNAPSHOT_KEYS])
            if not self.rig.engine.has_work and not self._coming():
                break
            for event in self._coming()[:1]:
                self._end(event)
            self.rig.step()
        assert not self.rig.engine.has_work
        assert self.rig.engine.is_idle
        for name, heard in self.heard.items():
            assert heard.is_complete or name in self.silenced
        for name, (count, events) in self.captures.items():
            assert len(events) == count or name in self.silenced
        for name, told in self.silenced.items():
            assert self._told(name) == told
        self.rig.assert_nothing_held()

    def _told(self, name: str) -> int:
        return len(self.heard[name].events) if name in self.heard else len(self.captures[name][1])


@pytest.mark.timeout(120)
def test_engine_machine(checkpoints: CheckpointFactory, device: torch.device) -> None:
    machine = type("Machine", (EngineMachine,), {"directory": checkpoints.directory(VARIANTS[0]), "device": device})
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None))
