"""The development overlay's pods, with mutual TLS, as processes with what their manifests give them."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy.pod_root import why_no_pods
from tests.deploy.rendering import ROOT, Manifest

_SECONDS = 400


@pytest.fixture(scope="module")
def seen(rendered: Mapping[str, list[Manifest]], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What the pods did, from their start to their end."""
    if reason := why_no_pods():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pods")
    (folder / "manifests.json").write_text(json.dumps(rendered["dev-tls"]))
    inside = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.deploy.run_pods", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


@pytest.mark.timeout(_SECONDS)
def test_they_answer_and_reuse_documents(seen: Mapping[str, Any]) -> None:
    first, second = seen["cached_tokens"]
    assert (first, second > 100) == (0, True)
    assert seen["texts"][0] == seen["texts"][1]


def test_a_request_without_a_key_of_the_secret_is_refused(seen: Mapping[str, Any]) -> None:
    assert seen["without_key"] == 401


def test_metrics_are_served_where_the_monitor_looks(seen: Mapping[str, Any]) -> None:
    assert seen["metrics"] == [200, 200, 200]
    assert seen["metrics_of_the_api"] == 404


def test_services_talk_to_nobody_without_a_certificate(seen: Mapping[str, Any]) -> None:
    """The control: probes reach the same health service in plain text on a port of its own."""
    assert seen["plain_text"] == [False, False]


def test_their_root_is_closed_and_temporary_files_are_not(seen: Mapping[str, Any]) -> None:
    """The control: these processes could have written nowhere else."""
    errors = dict(seen["writing"])
    assert errors.pop("/tmp/x") == ""
    assert set(errors.values()) == {f"OSError {errno.EROFS}"}


def test_they_end_well_when_they_are_told_to(seen: Mapping[str, Any]) -> None:
    assert seen["ended"] == {"router": 0, "worker": 0, "cache": 0}
