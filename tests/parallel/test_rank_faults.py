"""A fault that may have befallen one rank alone ends its engine, whose others would wait for it; alone it fails a request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from services.worker.engine.commands import Submit, SubmitCapture
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.recorder import Recording, SharedRecorder
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    FailedEvent,
    GenerateRequest,
    PromptPart,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.mixers.share import Share
from tests.models import VARIANTS, CheckpointFactory
from tests.parallel.observing import SEGMENT, load
from tests.unit.worker.engine_rig import Heard

FIRST_OF_THREE = Share(0, 3)


class _OutOfMemoryError(RuntimeError):
    pass


@dataclass(slots=True)
class Breaking:
    """Ranks without others, whose sums fail once they are to."""

    share: Share
    is_broken: bool = False

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise _OutOfMemoryError
        return partial


@dataclass(slots=True)
class Broken:
    """An engine whose passes fail behind the first sum, and what it said."""

    engine: Engine
    heard: Heard
    captured: list[CaptureEvent]

    def run(self) -> None:
        while not self.engine.is_idle:
            self.engine.step()


@pytest.fixture
def broken(request: pytest.FixtureRequest, checkpoints: CheckpointFactory) -> Broken:
    ranks = Breaking(Share(0, request.param))
    engine = Engine(load(checkpoints.directory(VARIANTS[0]), ranks), EngineLimits(context_length=2048))
    ranks.is_broken = True
    return Broken(engine, Heard(), [])


def ask(broken: Broken) -> None:
    parts = (PromptPart(SEGMENT),)
    Submit(GenerateRequest("asked", parts, SamplingOptions(4), broken.heard.events.append))(broken.engine)


def capture(broken: Broken) -> None:
    segments = (CaptureSegment(bytes(32), SEGMENT),)
    SubmitCapture(CaptureJob("captured", segments, broken.captured.append))(broken.engine)


@pytest.mark.parametrize("broken", [2], indirect=True)
@pytest.mark.parametrize("order", [ask, capture])
def test_a_rank_among_others_ends(broken: Broken, order: Callable[[Broken], None]) -> None:
    order(broken)
    with pytest.raises(_OutOfMemoryError):
        broken.run()
    assert broken.heard.events == []
    assert broken.captured == []


@pytest.mark.parametrize("broken", [1], indirect=True)
def test_a_rank_alone_goes_on(broken: Broken) -> None:
    ask(broken)
    capture(broken)
    broken.run()
    assert [type(event) for event in broken.heard.events] == [FailedEvent]
    assert [bool(event.reason) for event in broken.captured] == [True]


@dataclass(frozen=True, slots=True)
class Counting:
    """Ranks of which so many others do as they are asked."""

    others: int
    share: Share = FIRST_OF_THREE

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial + self.others


@dataclass(frozen=True, slots=True)
class Refusing:
    """A recorder that may refuse."""

    refuses: bool

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        if self.refuses:
            raise _OutOfMemoryError
        return Recording(run(), lambda: None)


def recorder(others: int, refuses: bool) -> SharedRecorder:
    return SharedRecorder(Refusing(refuses), Counting(others), torch.device("cpu"))


def test_a_recording_is_every_ranks() -> None:
    output = torch.ones(1)
    assert recorder(others=2, refuses=False).record(lambda: [output]).outputs == [output]


@pytest.mark.parametrize(("others", "refuses"), [(1, False), (2, True), (0, True)])
def test_a_recording_that_one_rank_lacks_is_nobodys(others: int, refuses: bool) -> None:
    with pytest.raises(RuntimeError, match="not every rank could record") as failed:
        recorder(others, refuses).record(lambda: [torch.ones(1)])
    assert isinstance(failed.value.__cause__, _OutOfMemoryError) == refuses
