"""Sizes as they are written on a command line."""

import math

__all__ = ["parse_capacity"]

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_capacity(text: str, all_bytes: int) -> int:
    """Bytes of `64GiB`, `800MiB`, `1000`, or of `10%` of all states.

    Raises:
        ValueError: it is none of these.
    """
    if text.endswith("%"):
        number, unit = float(text[:-1]), all_bytes / 100
    else:
        digits = text.rstrip("BKMGTibkmgt ")
        number, unit = float(digits), _UNITS.get(text[len(digits) :].strip().upper() or "B", 0)
    if not (number * unit > 0 and math.isfinite(number * unit)):
        raise ValueError("must be positive, and its unit one of B, KiB, MiB, GiB, TiB")
    return max(int(number * unit), 1)
