"""Builds the engine from settings; runs on the engine's thread."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.worker.adapters.served_model import ServedModel
from services.worker.engine.context import CaptureProfile, EngineContext, capture_chunk
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.pages import NoRoomError
from services.worker.engine.ranks import RankGroup
from services.worker.engine.sampling import CreateSampler, Sampler
from services.worker.engine.sweep_graphs import RECORDED_PASSES, RECORDED_TOKENS
from services.worker.engine.warm_up import WarmUp, warm_up
from services.worker.inspection.budget import PassSizes, share_memory
from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import measure_sizes
from services.worker.mixers.share import WHOLE, Share
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import read_json
from services.worker.models.decoder import Model
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import draw_model, find_family, load_checkpoint
from services.worker.settings import WorkerSettings

__all__ = ["RankPlace", "build_engine"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's place in a group. rendezvous: where its ranks meet; create_sampler: see `Engine`."""

    share: Share
    rendezvous: Path
    create_sampler: CreateSampler


def build_engine(
    settings: WorkerSettings,
    served: ServedModel,
    place: RankPlace | None = None,
    on_warm: Callable[[WarmUp], None] = lambda _: None,
) -> Engine:
    """Load the weights, or a rank's share of them, allocate the pools, and warm up where the settings say so.

    Raises:
        CheckpointError: the weights cannot be served, the device is not there, or the pages are too few.
        SplitError: the model cannot be split over so many ranks.
    """
    share = WHOLE if place is None else place.share
    if settings.tensor_parallel != share.count:
        raise CheckpointError(
            f"HYPIC_WORKER_TENSOR_PARALLEL is {settings.tensor_parallel}, and only `hypic worker` starts several ranks; set"
            " it to 1"
        )
    own_spec = served.spec.split(share)
    device = _choose_device(settings, share)
    torch.set_num_threads(settings.torch_threads)
    # A product over denormal numbers takes a hundred times as long on a CPU; they say nothing that fp32 sums would keep.
    torch.set_flush_denormal(True)
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    pools = _size_pools(settings, served, dtype, share)
    # A model without attention layers keeps nothing of a token; its pages are counted as if it kept a byte.
    num_pages = pools.page_bytes // (max(1, own_spec.token_bytes(dtype.itemsize)) * settings.page_tokens)
    least_segment = served.profile.seam.least_segment(max(1, served.spec.conv_history))
    if num_pages * settings.page_tokens < least_segment + served.spec.conv_history + 2:
        raise CheckpointError(f"{pools.said} holds only {num_pages} pages; raise it")
    ranks = None if place is None else RankGroup.join(share, device, place.rendezvous)
    memory = DeviceMemory(device, dtype, num_pages, settings.page_tokens, num_slots=settings.max_running, ranks=ranks)
    model = _load(settings, memory)
    chunk = capture_chunk(memory.device)
    profile = CaptureProfile(served.profile.seam, served.prime_ids, chunk, served.profile.encoding)
    create_sampler = Sampler if place is None else place.create_sampler
    try:
        context = EngineContext.create(model, memory, profile, pools.state_bytes)
        engine = Engine(context, _limits(settings, served), create_sampler)
    except NoRoomError as error:
        raise CheckpointError(
            f"{pools.said} does not hold the profile's prime of {len(served.prime_ids)} tokens ({error}); raise it"
        ) from error
    warms_up = settings.device != "cpu" if settings.warm_up is None else settings.warm_up
    if warms_up and not context.is_split:
        on_warm(warm_up(engine))
    return engine


def _load(settings: WorkerSettings, memory: DeviceMemory) -> Model:
    seed = settings.random_seed
    if seed is None:
        return load_checkpoint(settings.checkpoint, memory)
    with torch.inference_mode():
        return draw_model(settings.checkpoint, memory, seed)


def _choose_device(settings: WorkerSettings, share: Share) -> torch.device:
    """The rank's own GPU, which becomes the thread's: kernels and recorded passes go to the present one.

    Raises:
        CheckpointError: it is not there.
    """
    if not settings.device.startswith("cuda"):
        return torch.device(settings.device)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise CheckpointError(f"HYPIC_WORKER_DEVICE is {settings.device} but torch sees no GPU; set it to cpu")
    if found < share.count:
        raise CheckpointError(
            f"HYPIC_WORKER_TENSOR_PARALLEL is {share.count} but torch sees {found} GPUs; set it to {found} at most"
        )
    device = torch.device(settings.device) if share.count == 1 else torch.device("cuda", share.index)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


@dataclass(frozen=True, slots=True)
class _Pools:
    """said: the setting that they come from, for messages."""

    page_bytes: int
    state_bytes: int
    said: str


def _size_pools(settings: WorkerSettings, served: ServedModel, dtype: torch.dtype, share: Share) -> _Pools:
    """As the two settings say, or what a budget of everything leaves beside a share of the model.

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
    requests = record_requests(find_family(settings.checkpoint, fields), served.spec, dtype, frozenset(), share)
    sizes = measure_sizes(served.spec, requests, dtype.itemsize, share)
    shares = share_memory(settings.memory_bytes, served.spec.split(share), sizes, dtype.itemsize, passes)
    said = f"HYPIC_WORKER_MEMORY_BYTES of {settings.memory_bytes}"
    if shares.pages + shares.states <= 0:
        raise CheckpointError(
            f"{said} leaves nothing for pages and states: weights take {shares.weights}, running states {shares.slots},"
            f" captures {shares.carries}, the work of a pass of {passes.pass_tokens} tokens {shares.workspace};"
            " raise it, or lower HYPIC_WORKER_CONTEXT_LENGTH"
        )
    return _Pools(shares.pages, shares.states, said)


def _limits(settings: WorkerSettings, served: ServedModel) -> EngineLimits:
    """A GPU reads all weights for every pass, up to about 2,048 tokens at one price; a CPU pays for tokens alone.

    A sweep of several hundred tokens, which a GPU is through in two decode steps' time, runs between two of them.
    """
    capture_tokens, sweep_tokens, layer_tokens = (1024, 1, 1024) if settings.device == "cpu" else (4096, 2048, 20480)
    return EngineLimits(
        context_length=served.context_length,
        max_waiting=settings.max_waiting,
        max_running=settings.max_running,
        layer_tokens=settings.layer_tokens or layer_tokens,
        capture_tokens=settings.capture_tokens or capture_tokens,
        sweep_tokens=settings.sweep_tokens or sweep_tokens,
    )
