"""Two ranks say what one says, and each keeps its share of what one keeps; see `observing`."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.worker.mixers.gated_delta import GatedDeltaShape
from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.kimi_delta import KimiDeltaShape
from services.worker.mixers.shapes import MixerShape, PageShape, StateShape
from services.worker.mixers.share import Share, SplitError
from services.worker.models.registry import read_checkpoint_spec
from services.worker.models.spec import ModelSpec
from tests.exactness.rig import assert_close, assert_far
from tests.models import VARIANTS, CheckpointFactory, Variant
from tests.parallel.conftest import RANKS
from tests.parallel.observing import FORGOTTEN, forgetful_name, load, observe

TOLERANCE = 1e-5
UNSPLITTABLE = {
    "qwen3_5-attention-first": "3 linear key heads",
    "qwen3_5_moe-attention-first": "1 linear key heads",
    "kimi_linear-attention-first": "3 attention heads",
    "minimax-standard": "1 norm groups",
    "minimax-attention-first": "1 norm groups",
    "ring-linear-tail": "1 norm groups",
    "llama-scaled": "3 attention heads",
}

SPLITTABLE = [variant for variant in VARIANTS if variant.name not in UNSPLITTABLE]
of_splittable = pytest.mark.parametrize("variant", SPLITTABLE, ids=lambda variant: variant.name)

Seen = Mapping[str, torch.Tensor]


def own_runs(mixer: MixerShape) -> list[int]:
    """The channels of a convolution's tail: every run of heads is split for itself."""
    if isinstance(mixer, GatedDeltaShape):
        return list(mixer.conv_runs)
    if isinstance(mixer, KimiDeltaShape):
        return [mixer.channels] * 3
    return [0]


def take(whole: torch.Tensor, axis: int, share: Share) -> torch.Tensor:
    """A share of an axis."""
    return whole.tensor_split(share.count, dim=axis)[share.index]


def cut_linear(whole: Seen, layer: int, mixer: MixerShape, share: Share) -> dict[str, torch.Tensor]:
    """A rank's part of a linear layer's planes."""
    parts = {
        f"{name} {layer}": take(whole[f"{name} {layer}"], 0, share) for name in ("transition", "end_state", "decay")
    }
    runs = whole[f"tail {layer}"].split(own_runs(mixer), dim=1)
    return parts | {f"tail {layer}": torch.cat([take(run, 1, share) for run in runs], dim=1)}


def cut_attention(whole: Seen, layer: int, mixer: MixerShape, share: Share) -> dict[str, torch.Tensor]:
    """A rank's part of an attention layer's keys and values; latents are every rank's."""
    names = [f"keys {layer}", f"values {layer}"]
    if not isinstance(mixer, GroupedAttentionShape):
        return {name: whole[name] for name in names}
    return {name: take(whole[name], 1, mixer.key_share(share)) for name in names}


def cut_planes(whole: Seen, spec: ModelSpec, share: Share) -> dict[str, torch.Tensor]:
    """What a rank is to keep of what one rank keeps alone."""
    parts: dict[str, torch.Tensor] = {}
    mixers = [layer.mixer for layer in spec.layers]
    for layer, mixer in enumerate(mixer for mixer in mixers if isinstance(mixer.kept, StateShape)):
        parts |= cut_linear(whole, layer, mixer, share)
    for layer, mixer in enumerate(mixer for mixer in mixers if isinstance(mixer.kept, PageShape)):
        parts |= cut_attention(whole, layer, mixer, share)
    return parts


def test_which_shapes_are_refused(variant: Variant, splittable: list[Variant], checkpoints: CheckpointFactory) -> None:
    spec = read_checkpoint_spec(checkpoints.directory(variant))
    if variant.name not in UNSPLITTABLE:
        assert variant in splittable
        assert spec.split(Share()) is spec
        return
    assert variant not in splittable
    with pytest.raises(SplitError, match=rf"{UNSPLITTABLE[variant.name]}.* over 2 ranks; .*TENSOR_PARALLEL"):
        spec.split(Share(0, RANKS))


@pytest.fixture
def both(variant: Variant, seen: Path) -> list[dict[str, torch.Tensor]]:
    """What both ranks saw of a shape."""
    return [load_file(seen / f"{variant.name}.{index}") for index in range(RANKS)]


@of_splittable
def test_ranks_say_what_one_says(
    variant: Variant, both: list[dict[str, torch.Tensor]], checkpoints: CheckpointFactory
) -> None:
    directory = checkpoints.directory(variant)
    alone, spec = observe(load(directory, None)), read_checkpoint_spec(directory)
    for index, own in enumerate(both):
        for name in (name for name in alone if name.startswith("logits")):
            assert_close(own[name], alone[name], TOLERANCE, name)
            # What every rank computes for itself, it computes to the same bit.
            assert torch.equal(own[name], both[0][name])
        expected = cut_planes(alone, spec, Share(index, RANKS))
        assert {*expected} == {name for name in own if not name.startswith("logits")}
        for name, part in expected.items():
            assert own[name].shape == part.shape, name
            if part.numel():
                assert_close(own[name], part, TOLERANCE, f"{name} of rank {index}")


@of_splittable
def test_ranks_keep_different_shares(both: list[dict[str, torch.Tensor]]) -> None:
    """Else a rank that kept the other's heads would pass."""
    for name in both[0]:
        if name.startswith("end_state"):
            assert_far(both[1][name], both[0][name], TOLERANCE)


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_sum_left_out_is_seen(
    forgotten: int, seen: Path, splittable: list[Variant], checkpoints: CheckpointFactory
) -> None:
    directory = checkpoints.directory(splittable[0])
    whole = load_file(seen / f"{directory.name}.0")
    for index in range(RANKS):
        wrong = load_file(seen / f"{forgetful_name(directory, forgotten)}.{index}")
        assert_far(wrong["logits live"], whole["logits live"], TOLERANCE)
        assert_far(wrong["logits composed"], whole["logits composed"], TOLERANCE)
