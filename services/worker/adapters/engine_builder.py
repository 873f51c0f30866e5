"""Builds the engine from settings; runs on the engine's thread."""

from dataclasses import dataclass, replace

import torch

from services.worker.adapters.served_model import ServedModel
from services.worker.engine.combine_graph import RECORDED_PASSES, RECORDED_TOKENS
from services.worker.engine.context import CaptureProfile, EngineContext, capture_chunk
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.pages import NoRoomError
from services.worker.inspection.budget import PassSizes, share_memory
from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import measure_sizes
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import read_json
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import find_family, load_checkpoint
from services.worker.settings import WorkerSettings

__all__ = ["build_engine"]


def build_engine(settings: WorkerSettings, served: ServedModel) -> Engine:
    """Load the weights and allocate the pools.

    Raises:
        CheckpointError: the weights cannot be served, the device is not there, or the pages are too few.
    """
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise CheckpointError(f"HYPIC_WORKER_DEVICE is {settings.device} but torch sees no GPU; set it to cpu")
    if settings.device.startswith("cuda:"):
        # Of this thread: kernels and recorded passes go to the present device.
        torch.cuda.set_device(torch.device(settings.device))
    torch.set_num_threads(settings.torch_threads)
    # A product over denormal numbers takes a hundred times as long on a CPU; they say nothing that fp32 sums would keep.
    torch.set_flush_denormal(True)
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    pools = _size_pools(settings, served, dtype)
    # A model without attention layers keeps nothing of a token; its pages are counted as if it kept a byte.
    num_pages = pools.page_bytes // (max(1, served.spec.token_bytes(dtype.itemsize)) * settings.page_tokens)
    least_segment = served.profile.seam.least_segment(max(1, served.spec.conv_history))
    if num_pages * settings.page_tokens < least_segment + served.spec.conv_history + 2:
        raise CheckpointError(f"{pools.said} holds only {num_pages} pages; raise it")
    memory = DeviceMemory(
        torch.device(settings.device), dtype, num_pages, settings.page_tokens, num_slots=settings.max_running
    )
    model = load_checkpoint(settings.checkpoint, memory)
    profile = CaptureProfile(served.profile.seam, served.prime_ids, capture_chunk(memory.device))
    try:
        return Engine(EngineContext.create(model, memory, profile, pools.state_bytes), _limits(settings, served))
    except NoRoomError as error:
        raise CheckpointError(
            f"{pools.said} does not hold the profile's prime of {len(served.prime_ids)} tokens ({error}); raise it"
        ) from error


@dataclass(frozen=True, slots=True)
class _Pools:
    """said: the setting that they come from, for messages."""

    page_bytes: int
    state_bytes: int
    said: str


def _size_pools(settings: WorkerSettings, served: ServedModel, dtype: torch.dtype) -> _Pools:
    """As the two settings say, or what a budget of everything leaves.

    Raises:
        CheckpointError: it leaves nothing.
    """
    if settings.memory_bytes is None:
        said = f"HYPIC_WORKER_PAGE_BYTES of {settings.page_bytes}"
        return _Pools(settings.page_bytes, settings.state_bytes, said)
    limits = _limits(settings, served)
    # A prompt may have to be computed in place, in one pass.
    passes = PassSizes(max(limits.context_length, limits.sweep_tokens), limits.capture_tokens, settings.max_running)
    if settings.device != "cpu":
        passes = replace(passes, recorded_passes=RECORDED_PASSES, recorded_tokens=RECORDED_TOKENS)
    fields = read_json(settings.checkpoint / "config.json")
    requests = record_requests(find_family(settings.checkpoint, fields), served.spec, dtype, frozenset())
    sizes = measure_sizes(served.spec, requests, dtype.itemsize)
    shares = share_memory(settings.memory_bytes, served.spec, sizes, dtype.itemsize, passes)
    said = f"HYPIC_WORKER_MEMORY_BYTES of {settings.memory_bytes}"
    if shares.pages + shares.states <= 0:
        raise CheckpointError(
            f"{said} leaves nothing for pages and states: weights take {shares.weights}, running states {shares.slots},"
            f" captures {shares.carries}, the work of a pass of {passes.pass_tokens} tokens {shares.workspace};"
            " raise it, or lower HYPIC_WORKER_CONTEXT_LENGTH"
        )
    return _Pools(shares.pages, shares.states, said)


def _limits(settings: WorkerSettings, served: ServedModel) -> EngineLimits:
    """A GPU reads all weights for every pass, up to about 2,048 tokens at one price; a CPU pays for tokens alone."""
    capture_tokens, sweep_tokens = (1024, 1) if settings.device == "cpu" else (4096, 2048)
    return EngineLimits(
        context_length=served.context_length,
        max_waiting=settings.max_waiting,
        max_running=settings.max_running,
        layer_tokens=settings.layer_tokens,
        capture_tokens=settings.capture_tokens or capture_tokens,
        sweep_tokens=settings.sweep_tokens or sweep_tokens,
    )
