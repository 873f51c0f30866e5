"""One model with random weights, and engines over it whose pools are as large as a subject needs."""

import gc
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from bench.ceilings import Ceilings
from bench.engine_runs import token_ids
from bench.gpu.sizes import Sizes
from bench.gpu.weights import WeightSizes
from services.worker.engine.context import CaptureProfile, EngineContext, capture_chunk
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.requests import PromptPart
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import PageShape, StateShape
from services.worker.mixers.share import WHOLE, Ranks, Share
from services.worker.mixers.state import DeviceMemory
from services.worker.models.decoder import Layer, Model, PostNormLayer, PreNormLayer
from services.worker.models.registry import draw_model, read_checkpoint_spec
from services.worker.models.shared_layer import SharedLayer
from services.worker.models.spec import ModelSpec

__all__ = ["Rig"]

_Held = TypeVar("_Held")

# Nothing is to be evicted, put off or cut while it is measured.
_UNBOUNDED = 1 << 40


class Rig:
    """A model of a config's shape, drawn when it is first asked for and kept until `release`.

    ranks: with which others it is held, None for all of it here; num_layers: how many of its layers are drawn, None for all;
    packed_tokens: of one pass of captures or combines, which bounds what it takes beside the weights.
    """

    def __init__(
        self,
        config: Path,
        sizes: Sizes,
        device: torch.device,
        seed: int,
        ranks: Ranks | None = None,
        num_layers: int | None = None,
        packed_tokens: int = 1 << 15,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.num_layers = num_layers
        self.packed_tokens = packed_tokens
        self.sizes = sizes
        self.device = device
        self.seed = seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.spec = read_checkpoint_spec(config)
        self._model: Model | None = None

    @cached_property
    def ceilings(self) -> Ceilings:
        """What the device reaches."""
        return Ceilings.measure(self.device)

    @cached_property
    def weights(self) -> WeightSizes:
        """Bytes of the weights that are held here."""
        return WeightSizes.read(self.config, self.dtype, self.share)

    @property
    def share(self) -> Share:
        """What is held here of the model."""
        return WHOLE if self.ranks is None else self.ranks.share

    @property
    def own_spec(self) -> ModelSpec:
        """The shapes of what is held here; `spec` has the whole model's."""
        return self.spec.split(self.share)

    @property
    def is_drawn(self) -> bool:
        """The weights are on the device."""
        return self._model is not None

    @property
    def model(self) -> Model:
        """The model, whose own pools are as small as can be."""
        if self._model is None:
            memory = DeviceMemory(self.device, self.dtype, 1, self.sizes.page_tokens, num_slots=1, ranks=self.ranks)
            with torch.inference_mode():
                self._model = draw_model(self.config, memory, self.seed, self.num_layers)
        return self._model

    @property
    def first_of_each_kind(self) -> int:
        """Layers up to the first linear and the first attention layer, both included."""
        kinds = [type(kept) for kept in self.spec.kept]
        return 1 + max(kinds.index(kind) for kind in set(kinds))

    def engine(
        self,
        num_tokens: int,
        num_runs: int,
        num_slots: int = 1,
        num_layers: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Engine:
        """An engine over the same weights, of the first `num_layers` layers where it is given, widened to `dtype`.

        It has pages for `num_tokens` tokens in `num_runs` runs, each of which starts a page, beside its prime, and state
        slots for `num_slots` requests.
        """
        sizes = self.sizes
        pages = (num_tokens + sizes.prime_tokens) // sizes.page_tokens + num_runs + 2
        memory = DeviceMemory(self.device, dtype or self.dtype, pages, sizes.page_tokens, num_slots + 1, self.ranks)
        with torch.inference_mode():
            model = _rehouse(_widened(_first_layers(self.model, num_layers), self.dtype, memory.dtype), memory)
        profile = CaptureProfile(
            SeamWindow(sizes.seam_window), self.ids(7, sizes.prime_tokens), capture_chunk(self.device)
        )
        context = EngineContext.create(model, memory, profile, state_bytes=_UNBOUNDED)
        limits = EngineLimits(
            self.spec.context_length,
            max_waiting=1024,
            max_running=num_slots,
            layer_tokens=_UNBOUNDED,
            capture_tokens=self.packed_tokens,
            sweep_tokens=self.packed_tokens,
        )
        return Engine(context, limits)

    def ids(self, seed: int, count: int) -> tuple[int, ...]:
        """Token ids."""
        return token_ids(seed, count, self.spec.vocab_size)

    def question(self, number: int) -> PromptPart:
        """The last part of a prompt."""
        return PromptPart(self.ids(100_000 + number, self.sizes.question_tokens))

    def clear(self) -> None:
        """Give back what no one holds any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Forget the weights."""
        self._model = None
        self.clear()


def _first_layers(model: Model, count: int | None) -> Model:
    spec = replace(model.spec, layers=model.spec.layers[:count])
    return replace(model, spec=spec, layers=model.layers[:count])


def _widened(held: _Held, dtype: torch.dtype, wider: torch.dtype) -> _Held:
    """The same with every tensor of one dtype in another."""
    widened: Any = held
    if dtype == wider:
        return held
    if isinstance(held, torch.Tensor):
        widened = held.to(wider) if held.dtype == dtype else held
    elif is_dataclass(held) and not isinstance(held, type):
        own = {field.name: _widened(getattr(held, field.name), dtype, wider) for field in fields(held) if field.init}
        widened = replace(held, **own)
    elif isinstance(held, list | tuple):
        widened = type(held)(_widened(one, dtype, wider) for one in held)
    return cast(_Held, widened)


def _rehouse(model: Model, memory: DeviceMemory) -> Model:
    """The same weights over other pools."""
    layers = [
        _with_pools(layer, spec.mixer.kept, memory) for layer, spec in zip(model.layers, model.spec.layers, strict=True)
    ]
    return replace(model, layers=layers)


def _with_pools(layer: Layer, kept: StateShape | PageShape, memory: DeviceMemory) -> Layer:
    if isinstance(layer, SharedLayer):
        return replace(layer, share=_with_own_pools(layer.share, kept, memory))
    if isinstance(layer, PreNormLayer | PostNormLayer):
        return _with_own_pools(layer, kept, memory)
    raise TypeError(f"{type(layer).__name__} is no layer that can be given other pools")


def _with_own_pools(
    layer: PreNormLayer | PostNormLayer, kept: StateShape | PageShape, memory: DeviceMemory
) -> PreNormLayer | PostNormLayer:
    mixer = layer.mixer
    if isinstance(mixer, LinearMixer) and isinstance(kept, StateShape):
        return replace(layer, mixer=replace(mixer, slots=memory.add_linear_slots(kept)))
    if isinstance(mixer, PagedAttention) and isinstance(kept, PageShape):
        return replace(layer, mixer=replace(mixer, pool=memory.add_page_pool(kept)))
    raise TypeError(f"{type(mixer).__name__} is no mixer that can be given other pools")
