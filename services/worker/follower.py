"""`python -m services.worker.follower RANK DESCRIPTOR RENDEZVOUS REVISION`: one rank beside the leader that started it.

It reads the leader's environment, serves nobody, and does what it is told over the socket that the descriptor names.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from services.common.telemetry import configure_logging, get_logger
from services.worker.settings import WorkerSettings

__all__ = ["main"]


def main() -> int:
    """Follow until the leader ends the process; returns 2 for a fault of the checkpoint, 1 for any other."""
    # Signals are the leader's to understand: it drains, then ends its followers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    rank, descriptor, rendezvous, revision = sys.argv[1:]
    settings = WorkerSettings.load_or_exit()
    configure_logging(f"worker-rank-{rank}", settings.log_level, settings.log_format)
    from services.worker.adapters.engine_builder import RankPlace, build_engine
    from services.worker.adapters.served_model import read_served_model
    from services.worker.engine.leading import Orders, follow
    from services.worker.errors import WorkerError
    from services.worker.mixers.share import Share

    orders = Orders(socket.socket(fileno=int(descriptor)))
    orders.end_with_leader()
    share = Share(int(rank), settings.tensor_parallel)
    try:
        served = read_served_model(settings, revision)
        engine = build_engine(settings, served, RankPlace(share, Path(rendezvous), orders.create_sampler))
    except WorkerError as error:
        sys.stderr.write(f"hypic worker, rank {rank}: {error}\n")
        return 2
    try:
        follow(engine, orders)
    except Exception:
        get_logger().exception("rank_died", rank=share.index)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # What a device still waits for is never coming, and destructors would wait with it.
    os._exit(status)
