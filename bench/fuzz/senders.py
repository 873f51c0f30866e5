"""Two ways to make requests up: from the OpenAPI document, and by changing valid ones."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.fuzz.tally import Tally
from tests.mutations import RawRequest, draw_mutated

__all__ = ["send_generated", "send_mutated"]

PATIENCE_SECONDS = 60.0
_CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def send_mutated(base_url: str, model: str, count: int, seed_number: int, tally: Tally) -> None:
    """So many valid requests with something changed, eight at a time."""
    source = random.Random(seed_number)
    drawn = [draw_mutated(source, model) for _ in range(count)]
    with httpx2.Client(base_url=base_url, timeout=PATIENCE_SECONDS) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda request: _send(client, request, tally), drawn))


def _send(client: httpx2.Client, request: RawRequest, tally: Tally) -> None:
    shown = f"{request.method} {request.path} {request.content!r}"
    try:
        response = client.request(request.method, request.path, content=request.content)
    except httpx2.TimeoutException:
        tally.add_fault("hang", shown)
    except httpx2.TransportError as error:
        tally.add_fault("5xx", f"{error!r} {shown}")
    else:
        tally.take(response.status_code, response.content, shown)


def send_generated(base_url: str, model: str, count: int, seed_number: int, tally: Tally) -> None:
    """So many requests that schemathesis makes of the OpenAPI document: half valid by it, half not."""
    document = requests.get(f"{base_url}/openapi.json", timeout=PATIENCE_SECONDS).json()
    schemas = document["components"]["schemas"]
    for body in (
        each for name, each in schemas.items() if name.endswith("Body") and "model" in each.get("required", ())
    ):
        # A name made up is refused ahead of everything else.
        body["properties"]["model"] = {"enum": [model]}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base_url)
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    weights = [4 if operation.body else 1 for operation in operations]
    with requests.Session() as session:
        for operation, weight in zip(operations, weights, strict=True):
            for mode in schemathesis.GenerationMode:
                share = max(1, count * weight // (2 * sum(weights)))
                run = _one_by_one(operation, mode, share, seed_number, lambda case: _call(session, case, tally))
                # Of what takes nothing at all, nothing invalid can be made.
                with suppress(Unsatisfiable):
                    run()


def _one_by_one(
    operation: Any,  # noqa: ANN401 # schemathesis ships no types
    mode: schemathesis.GenerationMode,
    count: int,
    seed_number: int,
    call: Callable[[Any], None],
) -> Callable[[], None]:
    options = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    made = given(case=operation.as_strategy(generation_mode=mode))(lambda case: call(case))
    run: Callable[[], None] = seed(seed_number)(options(made))
    return run


def _call(session: requests.Session, case: Any, tally: Tally) -> None:  # noqa: ANN401 # schemathesis ships no types
    shown = case.as_curl_command()
    try:
        response = case.call(session=session, timeout=PATIENCE_SECONDS)
    except requests.Timeout:
        tally.add_fault("hang", shown)
        return
    except requests.ConnectionError as error:
        tally.add_fault("5xx", f"{error!r} {shown}")
        return
    tally.take(response.status_code, response.content, shown)
    try:
        case.validate_response(response, checks=_CHECKS)
    except (Failure, FailureGroup) as failure:
        tally.add_fault("not described", f"{failure} {shown}")
