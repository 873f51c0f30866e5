"""What a simulation refuses."""

__all__ = ["CostsError", "SimulationError"]


class SimulationError(Exception):
    """SimulationError
    └── CostsError: a file of costs, or a change to it; the message names file, field and remedy
    """


class CostsError(SimulationError):
    """See `SimulationError`."""
