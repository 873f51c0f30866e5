"""The ranks of one host that hold a model together: NCCL between GPUs, gloo between CPUs."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.worker.mixers.share import Share

__all__ = ["RankGroup", "rank_variables"]

# How long a rank waits for another: compiling a kernel takes long, and a rank that has died is seen by its process's end.
_PATIENCE = timedelta(minutes=10)


def rank_variables() -> dict[str, str]:
    """What the processes of a group have in their environment, where it says nothing else.

    Ranks of one host find each other over loopback. Sums inside the switch (NVLink multicast) need rights of the fabric's
    manager that a container often lacks, and start-up then fails.
    """
    return {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True, slots=True)
class RankGroup:
    """See `Ranks`. One a process: it is torch's default group."""

    share: Share

    @classmethod
    def join(cls, share: Share, device: torch.device, rendezvous: Path) -> "RankGroup":
        """Wait for the others at a file that all of them name and none has made; on a GPU it is the thread's device.

        A first sum opens every connection, so that no recording of passes has to.

        Raises:
            RuntimeError: the ranks do not reach each other.
        """
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{rendezvous.absolute()}",
            rank=share.index,
            world_size=share.count,
            timeout=_PATIENCE,
            device_id=device if on_gpu else None,
        )
        group = cls(share)
        counted = float(group.sum(torch.ones(1, device=device)))
        if counted != share.count:
            raise RuntimeError(f"{share.count} ranks add up to {counted}")
        return group

    def leave(self) -> None:
        """Behind the last sum: a process that ends without it does not end in order."""
        dist.destroy_process_group()

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Ranks`. A sum is made in one place and copied, so that its bits are the same everywhere."""
        whole = partial.contiguous()
        dist.all_reduce(whole)
        return whole
