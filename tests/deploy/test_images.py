"""Container files: no engine builds them here, so their parts are checked one by one."""

import fnmatch
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.dockerfiles import IMAGES, faults_of_dockerfile, is_in_context, stages
from tests.deploy.rendering import ROOT, Manifest, workloads

TARGETS = {"cpu.Dockerfile": ["services", "worker"], "gpu.Dockerfile": ["worker"]}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _hadolint(text: str) -> subprocess.CompletedProcess[str]:
    program = ROOT / ".venv" / "bin" / "hadolint"
    found = str(program) if program.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed: it comes with the extra dev on Linux")
    command = [found, "-c", str(IMAGES / "hadolint.yaml"), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", TARGETS)
def test_container_files_are_without_fault(name: str) -> None:
    text = (IMAGES / name).read_text()
    assert faults_of_dockerfile(text, TARGETS[name]) == []
    linted = _hadolint(text)
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("FROM python:3.12.12-slim-bookworm AS runtime", "FROM python:latest AS runtime", "is not pinned"),
        ("FROM python:3.12.12-slim-bookworm AS runtime", "FROM python AS runtime", "is not pinned"),
        ("USER 10001:10001", "", "runs as 0"),
        ("USER 10001:10001", "USER root", "runs as root"),
        ("COPY services services", "COPY service services", "service does not exist"),
        ("COPY services services", "COPY tests services", "left out by .dockerignore"),
        ("--from=build-services", "--from=built", "is no stage"),
        ('ENTRYPOINT ["hypic"]', "", "no entry point"),
        ('ENTRYPOINT ["hypic"]', "HEALTHCHECK CMD true", "health check"),
        ("WORKDIR /opt/hypic", "RUN pip install wheel", "has build tools"),
        ("org.opencontainers.image.version", "version", "no label version"),
    ],
)
def test_planted_faults_are_reported(old: str, new: str, words: str) -> None:
    text = (IMAGES / "cpu.Dockerfile").read_text()
    assert old in text
    faults = faults_of_dockerfile(text.replace(old, new), TARGETS["cpu.Dockerfile"])
    assert any(words in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("FROM debian\n", "DL3006"),
        ("FROM debian:latest\n", "DL3007"),
        ("FROM debian:12.5\nRUN cd /tmp\n", "DL3003"),
        ("FROM debian:12.5\nUSER root\n", "DL3002"),
        ("FROM debian:12.5\nCOPPY a b\n", "unexpected"),
    ],
)
def test_the_linter_refuses(text: str, rule: str) -> None:
    linted = _hadolint(text)
    assert linted.returncode != 0
    assert rule in linted.stdout + linted.stderr


def test_what_is_no_container_file_is_refused() -> None:
    with pytest.raises(ValueError, match="before FROM"):
        stages("RUN true\n")
    with pytest.raises(ValueError, match="no instruction"):
        stages("FROM a:1\nRun true\n")


@pytest.mark.parametrize(
    "path", ["tests/conftest.py", ".git/config", ".venv/bin/python", "services/x/__pycache__/y.pyc"]
)
def test_the_build_does_not_see(path: str) -> None:
    assert not is_in_context(path)


def test_images_of_the_overlays_are_those_that_are_built(rendered: Mapping[str, list[Manifest]]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    built = set(re.findall(r"-t \$\(IMAGES\)/([\w-]+):\$\(VERSION\)", makefile))
    used = {one["image"] for name in ("dev", "prod") for pod in workloads(rendered[name]) for one in pod.containers}
    assert used - {f"hypic/{name}:{PROJECT['version']}" for name in built} == {"redis:7.4.2-alpine"}
    assert built == {"services", "worker-cpu", "worker-gpu"}
    for name in TARGETS:
        assert f'image.version="{PROJECT["version"]}"' in (IMAGES / name).read_text()


def test_the_gpu_image_has_a_torch_and_a_triton_that_the_project_asks_for() -> None:
    pins = dict(line.split("==") for line in (IMAGES / "gpu-constraints.txt").read_text().split())
    extras = PROJECT["optional-dependencies"]
    wanted = {each.name: each for each in map(Requirement, [*extras["worker"], *extras["gpu"]])}
    assert set(pins) == {"torch", "triton"}
    for name, version in pins.items():
        assert wanted[name].specifier.contains(version)
    # What takes their place is taken out of the CPU's list by the file itself.
    assert "'/^(torch|triton)==/d' cpu.txt" in (IMAGES / "gpu.Dockerfile").read_text()


def test_images_install_every_extra_that_serves() -> None:
    text = "".join((IMAGES / name).read_text() for name in TARGETS)
    installed = {extra for extras in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in extras.split(",")}
    assert installed == {"router", "cache", "worker", "grammars", "tracing", "gpu"}
    assert installed <= set(PROJECT["optional-dependencies"])


def test_a_compiler_is_there_where_triton_needs_one() -> None:
    worker = stages((IMAGES / "gpu.Dockerfile").read_text())[-1]
    assert any("gcc" in command and "libpython3.12-dev" in command for command in worker.of("RUN"))


def test_the_demo_model_lies_where_the_overlay_looks(rendered: Mapping[str, list[Manifest]]) -> None:
    (folder,) = [
        manifest["data"]["HYPIC_WORKER_CHECKPOINT"]
        for manifest in rendered["dev"]
        if manifest["kind"] == "ConfigMap" and "HYPIC_WORKER_CHECKPOINT" in manifest["data"]
    ]
    copied = [copy for stage in stages((IMAGES / "cpu.Dockerfile").read_text()) for copy in stage.of("COPY")]
    assert f"models/demo {folder}" in copied
    assert Path(ROOT / "models" / "demo" / "model.safetensors").exists()


def test_what_services_read_beside_their_code_is_part_of_the_package() -> None:
    """An image has the built package, not the checkout."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in (ROOT / "services").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    beside = {path.name for path in files if path.suffix not in (".py", ".pyc")}
    assert "plan.lua" in beside
    assert [name for name in sorted(beside) if not any(fnmatch.fnmatch(name, each) for each in patterns)] == []
