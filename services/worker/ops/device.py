"""What the device of a tensor can run."""

from importlib.util import find_spec

import torch

__all__ = ["runs_kernels"]


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether an op on the tensor takes its Triton form: it lies on a GPU, and Triton is installed."""
    return tensor.is_cuda and find_spec("triton") is not None
