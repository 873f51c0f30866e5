"""Fixtures of the contract tests."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.directory_rig import Rig, create_rig
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server


@pytest.fixture(params=["memory", "redis"])
async def rig(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Rig]:
    """An empty directory with one living worker `w1`; whatever the test did, its indexes must agree afterwards."""
    rig = create_rig(request.param, redis_server.url)
    await rig.beat("w1")
    yield rig
    await rig.directory.check_integrity()
    await rig.directory.close()
