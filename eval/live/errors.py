"""What ends a live evaluation before its first answer."""

__all__ = ["LiveEvaluationError"]


class LiveEvaluationError(Exception):
    """It cannot be done; one line that names the file, line, field or address, and the remedy."""
