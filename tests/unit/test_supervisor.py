"""Where `hypic up` says that it listens."""

from pathlib import Path

import pytest

from services.cli.supervisor import Stack, StackOptions


@pytest.mark.parametrize(
    ("host", "base_url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("::", "http://[::1]:8123"),
        ("::1", "http://[::1]:8123"),
        ("10.1.2.3", "http://10.1.2.3:8123"),
    ],
)
def test_the_base_url_is_reachable_from_this_machine(host: str, base_url: str) -> None:
    """Readiness is probed there too: a listener on one address is not found on another."""
    assert Stack(StackOptions(Path("models/demo"), host, 8123)).base_url == base_url
