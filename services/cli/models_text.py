"""What `hypic models` prints for people."""

from collections.abc import Iterator, Sequence

from services.worker.inspection.capacity import Capacity
from services.worker.inspection.decays import DecayReport, DecaySource
from services.worker.inspection.families import WEIGHT_FORMATS, FamilyNotes
from services.worker.inspection.layers import BlockGroup
from services.worker.inspection.report import CheckpointReport
from services.worker.inspection.sizes import Sizes
from services.worker.inspection.weights import WeightsReport

__all__ = ["families_text", "report_text"]

_SHOWN = 5
_SOURCES = {
    DecaySource.FIXED: "fixed by head and layer, exact",
    DecaySource.RESTING: "gates at rest (A_log and dt_bias alone): real text opens and closes them; --text FILE measures",
    DecaySource.MEASURED: "measured on the given text",
}


def families_text(families: Sequence[FamilyNotes]) -> str:
    """A table, one family a line; then what is read of their weights."""
    head = ("family", "models", "model_type", "linear layers", "transition", "attention", "feed-forward", "verified by")
    rows = [
        (
            notes.name,
            notes.models,
            ", ".join(notes.model_types),
            notes.linear_layers or "-",
            notes.transition or "-",
            notes.attention_layers,
            notes.feed_forward,
            notes.verified_by,
        )
        for notes in families
    ]
    layouts = [(f"  {notes.name}", notes.layouts) for notes in families if notes.layouts]
    formats = f"weights: {WEIGHT_FORMATS}; and where families differ"
    return "\n".join([*_table([head, *rows]), "", formats, *_table(layouts)])


def report_text(report: CheckpointReport) -> str:
    """A page on one checkpoint."""
    head = [f"{report.directory}: {report.family}, bf16", *_shapes(report), "", *_sizes(report.sizes)]
    blocks = [head]
    if report.decays is not None:
        blocks.append(list(_decays(report.decays)))
    if report.capacity is not None:
        blocks.append(list(_capacity(report.capacity)))
    files = [f"{name} is missing: a worker needs it" for name in report.missing_files if report.weights is not None]
    blocks.append([*_weights(report.weights), *files, *_unknown(report.unknown_fields), *report.remarks])
    return "\n\n".join("\n".join(block) for block in blocks)


def _shapes(report: CheckpointReport) -> Iterator[str]:
    tied = "tied" if report.tied_head else "separate"
    yield f"hidden {report.hidden_size}, vocabulary {report.vocab_size} ({tied} head), context {report.context_length}"
    yield f"layers: {report.pattern}"
    yield from _table([_block(group) for group in (*report.mixers, *report.feed_forwards)])


def _block(group: BlockGroup) -> tuple[str, ...]:
    numbers = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in group.shape.items()}
    return f"  {group.num_layers} ×", group.kind, ", ".join(f"{name} {value}" for name, value in numbers.items())


def _sizes(sizes: Sizes) -> list[str]:
    segment = sizes.segment
    parts = {
        "transitions": segment.transitions,
        "end states": segment.end_states,
        "decays": segment.decays,
        "tails": segment.tails,
    }
    rows = [
        ("parameters", _count(sizes.parameters), f"{_count(sizes.active_parameters)} active a token"),
        ("weights", _bytes(sizes.weights), "in memory; norms and decays fp32"),
        ("a token keeps", _bytes(sizes.token), "keys and values, all attention layers"),
        ("a segment keeps", _bytes(segment.total), ", ".join(f"{name} {_bytes(part)}" for name, part in parts.items())),
        ("a running request", _bytes(sizes.request_state), "recurrent states (fp32) and tails"),
    ]
    return _table(rows)


def _decays(decays: DecayReport) -> Iterator[str]:
    yield f"decays over a body: {_SOURCES[decays.source]}"
    rows: list[tuple[str, ...]] = [
        ("  tokens", "heads above 0.01", "least", "quarter", "half", "three quarters", "most")
    ]
    for each in decays.spectra:
        share = f"{each.num_remembering} of {decays.num_heads}"
        rows.append((f"  {each.body_tokens}", share, *(f"{value:.2g}" for value in each.quantiles)))
    yield from _table(rows)


def _capacity(capacity: Capacity) -> Iterator[str]:
    assumed = capacity.assumptions
    share = f"{assumed.reserved_share:.0%} kept for activations and the runtime"
    gpus = "a GPU" if assumed.num_gpus == 1 else f"each of {assumed.num_gpus} GPUs"
    if capacity.free <= 0:
        yield f"{gpus} of {_bytes(capacity.gpu)} ({share}): the weights need {capacity.gpus_for_weights} of them"
        return
    yield f"{gpus} of {_bytes(capacity.gpu)} ({share}): {_bytes(capacity.free)} beside the weights hold either"
    tokens = "any number of" if capacity.tokens is None else f"{capacity.tokens:,}"
    yield f"  {tokens} tokens of keys and values, or"
    request, segment = _bytes(capacity.request), _bytes(capacity.segment)
    yield f"  {capacity.running_requests:,} running requests of {assumed.request_tokens} tokens ({request} each), or"
    yield (
        f"  {capacity.segments:,} segments of {assumed.body_tokens} tokens ({segment} each);"
        f" {capacity.segments_beside_running:,} beside {assumed.num_running} running requests"
    )


def _weights(weights: WeightsReport | None) -> Iterator[str]:
    if weights is None:
        yield "weights: none in the directory; sizes follow from config.json"
        return
    dtypes = ", ".join(f"{number} {dtype}" for dtype, number in weights.dtypes.items())
    verdict = "every tensor that is read is there" if weights.is_servable else "NOT servable"
    yield f"weights: {weights.num_tensors} tensors ({dtypes}); {verdict}; {weights.num_ignored} left out on purpose"
    yield from _listed("missing", weights.missing)
    faults = [
        f"{fault.name} is {list(fault.found)}, config.json implies {list(fault.implied)}"
        for fault in weights.wrong_shape
    ]
    yield from _listed("wrong shape", faults)
    yield from _listed("unreadable", weights.unreadable)
    yield from _listed("unexpected", weights.unexpected)


def _unknown(fields: Sequence[str]) -> Iterator[str]:
    if fields:
        yield f"config.json says what nothing here reads: {', '.join(fields)}"
    else:
        yield "config.json says nothing that is not read"


def _listed(title: str, items: Sequence[str]) -> Iterator[str]:
    for item in items[:_SHOWN]:
        yield f"  {title}: {item}"
    if len(items) > _SHOWN:
        yield f"  {title}: {len(items) - _SHOWN} more"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} B"
