"""The suite that every directory passes, run whole: what passed on which, and how many random steps."""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from bench.results import Row

__all__ = ["measure_contract", "read_report"]

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = ("tests/contract/test_redis_directory.py", "tests/contract/test_redis_security.py")
_STEPS = 12_000
_DIRECTORIES = {"memory": "in memory", "redis": "Redis 6.2 (wheel)", "system-redis": "Redis of the system"}


def measure_contract() -> Iterator[Row]:
    """Run the suite in a process of its own.

    Raises:
        subprocess.CalledProcessError: a test failed; pytest has printed which.
    """
    suite = [*sorted(str(path) for path in (_ROOT / "tests/contract").glob("test_directory*.py")), *_TESTS]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-o", "junit_family=xunit1", f"--junitxml={report}", *suite],
            cwd=_ROOT,
            env=os.environ | {"HYPIC_STATE_MACHINE_STEPS": str(_STEPS)},
            check=True,
        )
        yield from read_report(report.read_text())


def read_report(xml: str) -> Iterator[Row]:
    """Rows of a JUnit report: random histories have properties `checks` and `of`, other tests their directory in the name."""
    passed: Counter[str] = Counter()
    skipped = 0
    for case in ElementTree.fromstring(xml).iter("testcase"):
        if case.find("skipped") is not None:
            skipped += 1
            continue
        own = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        if "checks" in own:
            measure = f"random steps, each with an integrity check behind it, {own['of']}"
            yield Row(measure, int(own["checks"]), "", 10_000)
        passed[_directory(case.get("name", ""))] += 1
    for directory, number in sorted(passed.items()):
        yield Row(f"tests passed, {directory}", number, "")
    yield Row("tests skipped", skipped, "", 0, better="lower")


def _directory(name: str) -> str:
    return next((label for parameter, label in _DIRECTORIES.items() if f"[{parameter}" in name), "others")
