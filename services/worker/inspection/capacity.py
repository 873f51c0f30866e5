"""What fits a GPU beside the weights."""

from dataclasses import dataclass

from services.worker.inspection.sizes import Sizes

__all__ = ["GPU_BYTES", "Capacity", "CapacityAssumptions", "measure_capacity"]

_GIB = 1 << 30
# What the driver gives to a process, rounded down.
GPU_BYTES = {"a100": 79 * _GIB, "h100": 79 * _GIB, "h200": 139 * _GIB, "b200": 178 * _GIB}


@dataclass(frozen=True, slots=True)
class CapacityAssumptions:
    """What is counted with.

    reserved_share: of the GPU, for activations, the runtime and the allocator's gaps; request_tokens: live and generated
    tokens whose pages a running request owns; body_tokens: of a segment; num_running: requests that run at once; num_gpus:
    over how many the model is split.
    """

    reserved_share: float = 0.1
    request_tokens: int = 4096
    body_tokens: int = 2048
    num_running: int = 16
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits one GPU beside its share; every number but the last is for the whole remainder used for one thing.

    free: bytes beside weights and reserve, negative where the weights alone do not fit; gpus_for_weights: the fewest GPUs
    over which such shares can be spread; segment: bytes of one segment state with its pages; request: bytes of one running
    request; segments_beside_running: segment states beside `num_running` requests. Counts are 0 where nothing fits; tokens
    is None where a token leaves nothing behind.
    """

    gpu: int
    assumptions: CapacityAssumptions
    free: int
    gpus_for_weights: int
    segment: int
    request: int
    tokens: int | None
    running_requests: int
    segments: int
    segments_beside_running: int


def measure_capacity(sizes: Sizes, gpu_bytes: int, assumptions: CapacityAssumptions) -> Capacity:
    """Whole numbers, rounded down; `sizes` are those of one GPU's share."""
    usable = int(gpu_bytes * (1 - assumptions.reserved_share))
    free = usable - sizes.weights
    segment = sizes.segment.total + assumptions.body_tokens * sizes.token
    request = sizes.request_state + assumptions.request_tokens * sizes.token
    room = max(0, free)
    beside = max(0, free - assumptions.num_running * request)
    return Capacity(
        gpu=gpu_bytes,
        assumptions=assumptions,
        free=free,
        gpus_for_weights=-(-sizes.weights * assumptions.num_gpus // usable),
        segment=segment,
        request=request,
        tokens=room // sizes.token if sizes.token else None,
        running_requests=room // request,
        segments=room // segment,
        segments_beside_running=beside // segment,
    )
