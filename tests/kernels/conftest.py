"""Kernels on small shapes: in Triton's interpreter on the CPU, compiled where `HYPIC_DEVICE` names a GPU."""

import os

import pytest

from tests.kernels.interpreter import adapt_interpreter

pytest.importorskip("triton", reason="triton is not installed; it has no wheel for this platform")
if "TRITON_INTERPRET" in os.environ:
    adapt_interpreter()
