"""What a process logs, seen from outside."""

import json
import subprocess
import sys

WARNING_PROCESS = """
import warnings
from services.common.telemetry import configure_logging
configure_logging("worker", "info", "json")
for _ in range(2):
    warnings.warn("config.json: a field is missing", stacklevel=1)
"""


def test_a_warning_is_one_event() -> None:
    """Once for a place in the code, as warnings are."""
    process = subprocess.run([sys.executable, "-c", WARNING_PROCESS], capture_output=True, text=True, check=True)
    (line,) = process.stderr.splitlines()
    event = json.loads(line)
    assert event["event"] == "warning"
    assert event["level"] == "warning"
    assert event["service"] == "worker"
    assert event["category"] == "UserWarning"
    assert event["reason"] == "config.json: a field is missing"
