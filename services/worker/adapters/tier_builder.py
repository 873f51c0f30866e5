"""Opens the tiers that the settings name, the nearest first."""

from urllib.parse import quote

from services.common.telemetry import get_logger
from services.worker.errors import WorkerError
from services.worker.settings import WorkerSettings
from services.worker.tiers.disk import DiskStore
from services.worker.tiers.host import HostStore, allocate_pageable, allocate_pinned
from services.worker.tiers.port import BlobStore
from services.worker.tiers.redis import RedisStore

__all__ = ["TierError", "build_stores"]


class TierError(WorkerError):
    """A tier cannot be opened; the message names the setting and the remedy."""


def build_stores(settings: WorkerSettings) -> list[BlobStore]:
    """What an earlier process of this worker left in them is listed.

    Raises:
        TierError: the directory on disk cannot be used, the address of Redis is none, or ranks share the states.
    """
    if settings.tensor_parallel > 1 and (settings.host_bytes or settings.redis_url or settings.disk_directory):
        raise TierError(
            "HYPIC_WORKER_TENSOR_PARALLEL: ranks hold shares of states, which have no tiers yet; leave out"
            " HYPIC_WORKER_HOST_BYTES, HYPIC_WORKER_REDIS_URL and HYPIC_WORKER_DISK_DIRECTORY"
        )
    stores: list[BlobStore] = []
    # Worker ids are any text; a folder's or a key's part is not.
    owner = f"worker-{quote(settings.worker_id, safe='')}"
    if settings.host_bytes:
        stores.append(
            HostStore(settings.host_bytes, allocate_pageable if settings.device == "cpu" else allocate_pinned)
        )
    if settings.redis_url:
        stores.append(_open_redis(settings, settings.redis_url, owner))
    if settings.disk_directory is not None:
        directory = settings.disk_directory / owner
        try:
            stores.append(DiskStore(directory, settings.disk_bytes))
        except BlockingIOError as error:
            raise TierError(
                f"HYPIC_WORKER_DISK_DIRECTORY: {directory} is used by a worker that runs; give this one another"
                " HYPIC_WORKER_WORKER_ID"
            ) from error
        except OSError as error:
            raise TierError(f"HYPIC_WORKER_DISK_DIRECTORY: {error}; name a directory that may be written") from error
    return stores


def _open_redis(settings: WorkerSettings, url: str, owner: str) -> RedisStore:
    """A Redis that does not answer is an empty one until it does."""
    try:
        store = RedisStore(url, settings.redis_prefix, owner, settings.redis_bytes, settings.redis_blob_max_bytes)
    except ValueError as error:
        raise TierError(f"HYPIC_WORKER_REDIS_URL: {error}; write redis://host:port/database") from error
    try:
        store.take_back()
    except OSError as error:
        get_logger().warning("tier_unreachable", tier=store.tier, error=str(error))
    return store
