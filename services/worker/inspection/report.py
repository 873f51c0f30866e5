"""Everything that `hypic models check` says of a checkpoint directory; no weight is read but the gates' few numbers."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.inspection.capacity import Capacity, CapacityAssumptions, measure_capacity
from services.worker.inspection.decays import DecayReport, DecaySource, fixed_rates, resting_rates
from services.worker.inspection.families import unused_fields
from services.worker.inspection.fields import unknown_fields
from services.worker.inspection.layers import BlockGroup, feed_forward_groups, mixer_groups, mixer_pattern
from services.worker.inspection.requests import TensorRequest, record_requests
from services.worker.inspection.sizes import Sizes, measure_sizes
from services.worker.inspection.weights import WeightsReport, compare_weights
from services.worker.mixers.share import Share
from services.worker.models.checkpoint import CheckpointDirectory, read_json
from services.worker.models.fields import RecordedConfig
from services.worker.models.quantisation import BlockScales, read_block_scales
from services.worker.models.registry import Family, find_family
from services.worker.models.spec import ModelSpec

__all__ = ["CheckpointReport", "inspect_checkpoint"]

_DTYPE = torch.bfloat16
_SERVED_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """One checkpoint, served in bf16.

    pattern: see `mixer_pattern`; weights: None where the directory holds none; decays: None without linear layers, and where
    they depend on weights that are not there; capacity: None when no GPU was named; remarks: what the family warns of;
    missing_files: what serving needs beside config and weights.
    """

    directory: str
    family: str
    hidden_size: int
    vocab_size: int
    context_length: int
    tied_head: bool
    pattern: str
    mixers: tuple[BlockGroup, ...]
    feed_forwards: tuple[BlockGroup, ...]
    sizes: Sizes
    unknown_fields: tuple[str, ...]
    remarks: tuple[str, ...]
    missing_files: tuple[str, ...]
    weights: WeightsReport | None
    decays: DecayReport | None
    capacity: Capacity | None


@dataclass(frozen=True, slots=True)
class _Findings:
    """What depends on whether there are weights."""

    requests: Mapping[str, TensorRequest]
    weights: WeightsReport | None
    decays: DecayReport | None


def inspect_checkpoint(
    directory: Path, gpu_bytes: int | None = None, assumptions: CapacityAssumptions | None = None
) -> CheckpointReport:
    """Describe a directory with a `config.json`, with weights or without; `gpu_bytes` is that of one GPU.

    Raises:
        CheckpointError: the config, or a file of the weights, is missing, damaged or not supported.
        SplitError: the model cannot be split over as many GPUs as are assumed.
    """
    assumed = assumptions or CapacityAssumptions()
    config = read_json(directory / "config.json")
    recorded = RecordedConfig(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        family = find_family(directory, recorded)
        spec = family.read_spec(recorded)
        blocks = read_block_scales(recorded)
        has_weights = any(directory.glob("*.safetensors"))
        findings = _with_weights(directory, family, spec, blocks) if has_weights else _without_weights(family, spec)
    sizes = measure_sizes(spec, findings.requests, _DTYPE.itemsize)
    return CheckpointReport(
        directory=str(directory),
        family=spec.family,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        tied_head=spec.tied_head,
        pattern=mixer_pattern(spec),
        mixers=mixer_groups(spec),
        feed_forwards=feed_forward_groups(spec),
        sizes=sizes,
        unknown_fields=unknown_fields(config, recorded, unused_fields(spec.family)),
        remarks=tuple(dict.fromkeys(str(warning.message) for warning in caught)),
        missing_files=tuple(name for name in _SERVED_FILES if not (directory / name).exists()),
        weights=findings.weights,
        decays=findings.decays,
        capacity=None
        if gpu_bytes is None
        else measure_capacity(_split_sizes(family, spec, findings, assumed.num_gpus), gpu_bytes, assumed),
    )


def _split_sizes(family: Family, spec: ModelSpec, findings: _Findings, count: int) -> Sizes:
    """One rank's; loaders choose between layouts as they did for the whole model."""
    share = Share(0, count)
    requests = record_requests(family, spec, _DTYPE, frozenset(findings.requests), share)
    return measure_sizes(spec, requests, _DTYPE.itemsize, share)


def _without_weights(family: Family, spec: ModelSpec) -> _Findings:
    requests = record_requests(family, spec, _DTYPE, frozenset())
    return _Findings(requests, None, _fixed_decays(spec))


def _with_weights(directory: Path, family: Family, spec: ModelSpec, blocks: BlockScales | None) -> _Findings:
    with CheckpointDirectory(directory, blocks) as checkpoint:
        requests = record_requests(family, spec, _DTYPE, checkpoint.names())
        headers = {name: checkpoint.header(name) for name in sorted(checkpoint.names())}
        weights = compare_weights(requests, headers, len(spec.layers), blocks)
        decays = _fixed_decays(spec)
        if decays is None and weights.is_servable:
            rates = resting_rates(checkpoint, requests)
            decays = DecayReport.from_rates(DecaySource.RESTING, rates) if rates else None
    return _Findings(requests, weights, decays)


def _fixed_decays(spec: ModelSpec) -> DecayReport | None:
    rates = fixed_rates(spec)
    return DecayReport.from_rates(DecaySource.FIXED, rates) if rates else None
