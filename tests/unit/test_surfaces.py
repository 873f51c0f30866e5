"""What each service shows to others, and its error tree: neither grows unseen."""

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

SURFACES = {
    "services.cli.main": ["app", "main"],
    "services.router.bootstrap": ["RouterServer", "bind", "create_app", "create_server", "main", "serve"],
    "services.cache.bootstrap": ["CacheProcess", "create_directory", "main", "run", "serve", "start"],
    "services.cache.domain.directory": ["Directory"],
    "services.cache.domain.orders": [
        "Claim", "Copy", "DocumentRef", "HeartbeatReply", "PinReply", "PlanOrder", "PlanReply",
        "PlannedEntry", "PublishOrder", "PublishReply", "RegisterOrder", "RegisterReply", "Ticket", "Usage", "Wanted",
    ],
    "services.worker.bootstrap": ["main"],
    "services.worker.calibration": [
        "CalibrationCard", "CalibrationError", "CardModel", "CardPrompts", "CardSetting", "Estimate", "MeasuredCost",
        "load_card", "mismatch", "seal_card", "write_card",
    ],
    "services.worker.serving": ["serve"],
    "services.worker.inspection.report": ["CheckpointReport", "inspect_checkpoint"],
    "services.worker.engine.loop": ["Engine"],
    "services.worker.engine.requests": [
        "CaptureEvent", "CaptureJob", "CaptureSegment", "EngineError", "EngineFullError", "FailedEvent", "FetchEvent",
        "FinishReason", "FinishedEvent", "GenerateEvent", "GenerateRequest", "HeldEvent", "NotServedError",
        "PrefilledEvent", "PromptPart", "PromptTooLargeError", "ServedPart", "Serving", "SnapshotOrder",
        "StoredSnapshot", "TokenEvent", "TurnHeldEvent", "TurnHold",
    ],
    "services.worker.ops.recurrence.naive": ["capture", "scan", "step", "walk"],
    "services.worker.ops.short_conv.naive": ["step", "walk"],
    "services.worker.ops.paged_attention.naive": ["attend"],
    "services.worker.ops.routed_swiglu.naive": ["feed_forward"],
    "services.common.content": ["HASH_BYTES", "chain_hash", "content_hash"],
    "services.common.errors": [
        "ConflictError", "DeadlineError", "HypicError", "InternalError", "InvalidRequestError", "NotFoundError",
        "OverloadedError", "UnavailableError", "error_from_code", "error_from_status", "status_code",
    ],
    "services.common.rpc": [
        "CHUNK_BYTES", "LIVENESS", "READINESS", "HealthSwitch", "cache_channel", "create_channel", "create_server",
        "request_metadata", "serve_health", "worker_channel",
    ],
    "services.common.settings": ["PeerSettings", "ServiceSettings", "SettingsError"],
    "services.common.buckets": ["INTER_TOKEN", "REQUEST", "STAGE", "TIME_TO_FIRST_TOKEN"],
    "services.common.streams": ["DrainedStreams", "OpenStream"],
    "services.common.tracing": [
        "TRACE_HEADER", "add_span", "configure_tracing", "current_span", "serve_rpc", "trace_parent",
    ],
    "services.common.telemetry": [
        "configure_logging", "current_request_id", "get_logger", "new_request_id", "serve_metrics", "set_request_id",
    ],
}  # fmt: skip

# The module that draws a service's error tree, and the packages whose errors must stand in it.
TREES = {
    "services.common.errors": ("HypicError", "services.common", {"SettingsError"}),
    "services.cache.domain.errors": ("CacheError", "services.cache", {"TraceError"}),
    "services.router.domain.errors": ("RouterError", "services.router", set()),
    "services.worker.errors": ("WorkerError", "services.worker", set()),
}


def _modules(package: str) -> list[ModuleType]:
    root = importlib.import_module(package)
    found = pkgutil.walk_packages(root.__path__, f"{package}.")
    return [root, *(importlib.import_module(module.name) for module in found)]


@pytest.mark.parametrize("module", SURFACES)
def test_public_names_are_frozen(module: str) -> None:
    assert importlib.import_module(module).__all__ == SURFACES[module]


@pytest.mark.parametrize(
    "package", ["services.cli", "services.router", "services.cache", "services.worker", "services.common"]
)
def test_public_names_exist(package: str) -> None:
    for module in _modules(package):
        missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
        assert missing == [], module.__name__


def _ancestry(error: type[BaseException], root: str) -> list[str]:
    names = [base.__name__ for base in error.__mro__]
    return names[: names.index(root) + 1] if root in names else names


def _drawn(docstring: str) -> dict[str, int]:
    """Every name of the tree, with its depth."""
    lines = (re.match(r"([│├└─ ]*)(\w+Error)\b", line) for line in docstring.splitlines())
    return {match[2]: len(match[1]) // 4 for match in lines if match}


@pytest.mark.parametrize("tree", TREES)
def test_the_error_tree_is_drawn_as_it_is(tree: str) -> None:
    """Every error of a service hangs from the one root, at the depth at which the docstring draws it."""
    root, package, apart = TREES[tree]
    defined = {
        value.__name__: len(_ancestry(value, root)) - 1
        for module in _modules(package)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    }
    assert _drawn(importlib.import_module(tree).__doc__ or "") == {
        name: depth for name, depth in defined.items() if name not in apart
    }
