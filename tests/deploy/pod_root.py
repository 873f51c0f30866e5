"""A root file system as a pod of the manifests has it: read only, with a writable /tmp, for a user without rights.

For a process in mount, network and process namespaces of its own; what it mounts ends with it.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.rendering import ROOT

__all__ = ["ENVIRONMENT", "PROJECT", "PodRoot", "why_no_pods"]

# Where the project and its Python environment stand inside: outside they may lie in /tmp, which pods have for themselves.
PROJECT, ENVIRONMENT = Path("/srv/hypic"), Path("/srv/environment")
_PROGRAMS = ("unshare", "setpriv", "mount", "chroot", "ip")


def why_no_pods() -> str:
    """Why this machine cannot make one; empty when it can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no program {', '.join(missing)}"
    probe = ["unshare", "--mount", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class PodRoot:
    """`path` becomes the root of each process that `command` starts."""

    path: Path

    def lay(self, files: Mapping[str, str], folders: Mapping[str, Path], user: int) -> None:
        """Mount the programs, `files` by their path and text, `folders` by where they are seen; then close it."""
        _mount("-t", "tmpfs", "none", str(self.path))
        for path in (Path("/usr"), Path(sys.base_prefix)):
            self._bind(path, path)
        self._bind(ROOT, PROJECT)
        self._bind(Path(sys.prefix), ENVIRONMENT)
        for link in map(Path, ("/bin", "/lib", "/lib64", "/sbin")):
            if link.is_symlink():
                (self.path / link.name).symlink_to(link.readlink())
            elif link.exists():
                self._bind(link, link)
        for place, folder in folders.items():
            self._bind(folder, Path(place))
        self._bind(Path("/dev"), Path("/dev"), read_only=False)
        for place, kind, options in (
            ("proc", "proc", "ro"),
            ("dev/shm", "tmpfs", "size=64m,mode=1777"),
            ("tmp", "tmpfs", f"size=64m,mode=1777,uid={user}"),
        ):
            (self.path / place).mkdir(exist_ok=True)
            _mount("-t", kind, "-o", options, "none", str(self.path / place))
        for name, text in {**_accounts(user), **files}.items():
            target = self.path / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        shutil.copy("/etc/ld.so.cache", self.path / "etc" / "ld.so.cache")
        _mount("-o", "remount,ro", str(self.path))

    def command(self, user: int, group: int, arguments: Sequence[str]) -> list[str]:
        """Runs `arguments` inside, confined as the manifests ask."""
        confined = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        return ["chroot", str(self.path), "setpriv", *confined, "--inh-caps=-all", *arguments]

    def _bind(self, source: Path, place: Path, *, read_only: bool = True) -> None:
        target = self.path / place.relative_to("/")
        if not target.exists():
            target.mkdir(parents=True)
        _mount("--bind", str(source), str(target))
        if read_only:
            _mount("-o", "remount,bind,ro", str(target))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)


def _accounts(user: int) -> dict[str, str]:
    return {
        "/etc/passwd": f"root:x:0:0::/:/bin/false\nhypic:x:{user}:{user}::/tmp:/bin/false\n",
        "/etc/group": f"root:x:0:\nhypic:x:{user}:\n",
        "/etc/nsswitch.conf": "hosts: files\n",
        "/etc/resolv.conf": "",
    }
