"""Entry point of `hypic worker`: reads the settings, prepares the process, serves."""

import asyncio
import os
import sys

from services.common.telemetry import configure_logging
from services.common.tracing import configure_tracing
from services.worker.settings import WorkerSettings

__all__ = ["main"]


def main() -> None:
    """Serve until SIGTERM or SIGINT; the exit status is 2 for a fault of settings or checkpoint."""
    settings = WorkerSettings.load_or_exit()
    configure_logging("worker", settings.log_level, settings.log_format)
    configure_tracing("worker", "HYPIC_WORKER_OTLP_ENDPOINT", settings.otlp_endpoint)
    # OpenMP reads both once, when torch is imported: hence the late import.
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.torch_threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from services.worker.serving import serve

    status = asyncio.run(serve(settings))
    if settings.tensor_parallel > 1:
        # A thread, or a destructor, may wait for a device on which another rank will never do its part.
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
