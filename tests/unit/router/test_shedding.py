"""Requests are refused by what workers have to do now: only when no worker can take one, and never longer than that."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.domain.shedding import SheddingPolicy, shed
from services.router.domain.unmeasured import UNMEASURED
from services.router.domain.workers import Role, WorkerView

POLICY = SheddingPolicy(queue_seconds=10.0, requests_per_worker=8)
VIEWS = st.lists(
    st.builds(
        lambda backlog, running, combines, draining: view(backlog, running, combines, draining),
        st.floats(0, 100),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)


def view(backlog: float = 0.0, running: int = 0, combines: bool = True, draining: bool = False) -> WorkerView:
    roles = frozenset({Role.COMBINE if combines else Role.PREFILL})
    return WorkerView("w", UNMEASURED, roles, backlog_seconds=backlog, running_requests=running, is_draining=draining)


@given(VIEWS)
def test_it_refuses_exactly_when_no_worker_can_take_one(views: list[WorkerView]) -> None:
    taking = [each for each in views if Role.COMBINE in each.roles and not each.is_draining]
    able = [each for each in taking if each.running_requests < 8 and each.backlog_seconds <= 10.0]
    found = shed(views, POLICY)
    assert (found is not None) == bool(taking and not able)
    if found:
        assert 0 < found.retry_after_seconds <= 60


@given(VIEWS)
def test_one_more_free_worker_ends_it(views: list[WorkerView]) -> None:
    assert shed([*views, view()], POLICY) is None


def test_it_says_why_and_when() -> None:
    waiting = shed([view(backlog=25.0), view(backlog=18.0)], POLICY)
    assert waiting is not None
    assert (waiting.reason, waiting.retry_after_seconds) == ("the least busy worker has work for 18.0 s", 8.0)
    full = shed([view(running=8), view(running=9)], POLICY)
    assert full is not None
    assert "8 requests" in full.reason
