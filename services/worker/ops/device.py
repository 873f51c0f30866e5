"""What a device can run."""

from importlib.util import find_spec

import torch

__all__ = ["has_kernels", "runs_kernels"]


def has_kernels(device: torch.device) -> bool:
    """Whether ops on a device take their Triton form: it is a GPU, and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether an op on the tensor takes its Triton form."""
    return has_kernels(tensor.device)
