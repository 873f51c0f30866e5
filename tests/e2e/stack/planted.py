"""Faults that are planted in a served worker, and taken away again while it runs.

The worker's process finds a `sitecustomize` ahead of its own: it changes how bodies are composed as long as a file says so.
"""

import os
import sys
from enum import StrEnum
from pathlib import Path

__all__ = ["Fault", "FaultSwitch"]

_HOOK = '''
"""Runs at the start of every Python process that finds it; only workers are touched."""
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

SWITCH = Path(os.environ["PLANTED_FAULT"])


def planted(name):
    return SWITCH.exists() and SWITCH.read_text() == name


def plant_transition(module):
    import torch

    mixer = module.LinearMixer
    body = mixer._body

    def changed(self, plane, *given):
        found = body(self, plane, *given)
        if found is None or not planted("transition"):
            return found
        kept = 4 * torch.eye(found.transition.shape[-1]).expand_as(found.transition)
        return module.Body(kept, found.end_state)

    mixer._body = changed


class Finder(importlib.abc.MetaPathFinder):
    changes = {"services.worker.mixers.linear": plant_transition}

    def find_spec(self, name, path, target=None):
        change = self.changes.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if "worker" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
'''


class Fault(StrEnum):
    """transition: bodies make more of what stands before them, and forget nothing."""

    TRANSITION = "transition"


class FaultSwitch:
    """Plants one fault at a time in the workers of a stack that has `variables`; `folder` is empty."""

    def __init__(self, folder: Path) -> None:
        self._switch = folder / "fault"
        (folder / "sitecustomize.py").write_text(_HOOK)
        self.variables = {
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
            "PLANTED_FAULT": str(self._switch),
        }

    def plant(self, fault: Fault) -> None:
        """From the next combine on."""
        self._switch.write_text(fault)

    def heal(self) -> None:
        """No more."""
        self._switch.unlink(missing_ok=True)
