"""Fixtures of the contract tests."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.directory_rig import Rig, create_rig
from tests.redis_server import redis_server as redis_server
from tests.redis_server import system_redis_server as system_redis_server


@pytest.fixture(params=["memory", "redis", "system-redis"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """An empty directory with one living worker `w1`; whatever the test did, its indexes must agree afterwards."""
    servers = {"redis": "redis_server", "system-redis": "system_redis_server"}
    name = servers.get(request.param)
    rig = create_rig("redis" if name else "memory", request.getfixturevalue(name).url if name else "")
    await rig.beat("w1")
    yield rig
    await rig.directory.check_integrity()
    await rig.directory.close()
