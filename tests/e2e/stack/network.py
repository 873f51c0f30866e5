"""A network namespace with one cable to this one, which a test pulls."""

import os
import shutil
import subprocess
from typing import Self

__all__ = ["Namespace", "why_no_namespaces"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)


def why_no_namespaces() -> str:
    """Why this machine cannot make one; empty when it can."""
    if shutil.which("ip") is None:
        return "no program ip"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Namespace("probe"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"


class Namespace:
    """Processes inside reach `outer`, and are reached at `inner`, while the cable is in."""

    def __init__(self, name: str) -> None:
        self._name = f"hypic-{name}-{os.getpid()}"
        # Names of links have at most 15 characters.
        self._cable, self._end = (f"{side}{os.getpid() % 10**8}" for side in ("hya", "hyb"))
        self.outer, self.inner = "10.213.77.1", "10.213.77.2"
        self.command = ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", self._end)
            _run("ip", "link", "set", self._end, "netns", self._name)
            _run("ip", "addr", "add", f"{self.outer}/30", "dev", self._cable)
            _run(*self.command, "ip", "addr", "add", f"{self.inner}/30", "dev", self._end)
            _run(*self.command, "ip", "link", "set", self._end, "up")
            _run(*self.command, "ip", "link", "set", "lo", "up")
            self.plug()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for command in (("ip", "link", "del", self._cable), ("ip", "netns", "del", self._name)):
            subprocess.run(command, check=False, capture_output=True, timeout=10)

    def cut(self) -> None:
        """Packets vanish, both ways."""
        _run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """They pass again."""
        _run("ip", "link", "set", self._cable, "up")
