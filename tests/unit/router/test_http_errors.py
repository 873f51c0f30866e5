"""Every error's one way out."""

import pytest

from services.common.errors import (
    ConflictError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from services.router.adapters.http_errors import http_error
from services.router.domain.request import PromptError

ADDRESS = "ipv4:10.1.2.3:7102"


@pytest.mark.parametrize(
    ("error", "status", "is_retried"),
    [
        (UnavailableError(ADDRESS), 503, True),
        (DeadlineError(ADDRESS), 504, False),
        (InternalError(ADDRESS), 500, False),
        (ConflictError(ADDRESS), 500, False),
        (NotFoundError(ADDRESS), 500, False),
        (RuntimeError(ADDRESS), 500, False),
        (OverloadedError("no room"), 429, True),
        (InvalidRequestError("too long"), 400, False),
        (PromptError("bad", param="x"), 400, False),
        (PromptError("who", param="model", code="model_not_found"), 404, False),
    ],
)
def test_errors_have_a_status_and_say_nothing_of_the_inside(error: Exception, status: int, is_retried: bool) -> None:
    seen = http_error(error)
    assert seen.status == status
    assert ADDRESS not in seen.message
    assert ("retry-after" in seen.headers) == is_retried
    assert ("x-should-retry" in seen.headers) == (not is_retried)
