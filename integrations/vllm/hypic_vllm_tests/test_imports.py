"""The package needs nothing of the worker but the header of states and the gRPC client, and vLLM in two modules alone."""

import ast
from pathlib import Path

_SOURCES = sorted((Path(__file__).parents[1] / "src" / "hypic_vllm").glob("*.py"))
_ALLOWED = {"services.blob", "hypic.v1", "hypic_vllm"}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_nothing_of_a_service_is_imported() -> None:
    assert _SOURCES
    for path in _SOURCES:
        own = {name for name in _imports(path) if name.startswith(("services", "hypic"))}
        assert all(".".join(name.split(".")[:2]) in _ALLOWED or name.startswith("hypic_vllm.") for name in own), path


def test_decisions_are_free_of_vllm_and_torch() -> None:
    for path in _SOURCES:
        heads = {name.split(".")[0] for name in _imports(path)}
        assert "vllm" not in heads or path.stem in ("connector", "facts")
        assert "torch" not in heads or path.stem not in ("claims", "gate", "options", "fetch")
