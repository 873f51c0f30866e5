"""Manifests against Kubernetes' own schemas, several versions of them, and against ours for custom resources."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from kubernetes_validate import utils

from tests.deploy.rendering import ROOT, Manifest

__all__ = ["OLDEST", "faults_of_schemas", "remember_schemas", "versions"]

SCHEMAS = ROOT / "deploy" / "schemas"
# The first version whose pods sleep ahead of their end without being told to in a feature gate.
OLDEST = "1.30"


def versions() -> list[str]:
    """Every version from the oldest that is claimed to the newest that the library ships."""
    known = {utils.major_minor(each) for each in utils.all_versions()}
    return sorted((each for each in known if _number(each) >= _number(OLDEST)), key=_number)


def remember_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads megabytes of definitions for every manifest; once a version is enough."""
    monkeypatch.setattr(utils, "schema_contents", cache(utils.schema_contents))


def faults_of_schemas(manifests: Sequence[Manifest], version: str) -> list[str]:
    """What does not follow its schema, strictly: a misspelt field is a fault."""
    return [fault for each in manifests for fault in _faults(each, version)]


def _faults(manifest: Manifest, version: str) -> Iterator[str]:
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    own = SCHEMAS / f"{manifest['apiVersion'].replace('/', '-')}-{manifest['kind']}.json"
    if own.exists():
        yield from (
            f"{name}: {error.json_path}: {error.message}" for error in _validator(own.name).iter_errors(manifest)
        )
        return
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{name} ({version}): {error.json_path}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        yield f"{name}: no schema of {manifest['apiVersion']} {manifest['kind']}"


@cache
def _validator(file: str) -> Draft202012Validator:
    schema: dict[str, Any] = json.loads((SCHEMAS / file).read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
