"""A supervised child never outlives a killed supervisor: it would keep its ports."""

import ctypes
import os
import signal
import sys

__all__ = ["SUPERVISOR_VARIABLE", "end_with_supervisor"]

# Set by `hypic up` for its children: the process id of the supervisor.
SUPERVISOR_VARIABLE = "HYPIC_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def end_with_supervisor() -> None:
    """Ask the kernel for SIGTERM when the supervisor dies; does nothing outside `hypic up`, or where this is not Linux."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(supervisor):
        raise SystemExit(1)
