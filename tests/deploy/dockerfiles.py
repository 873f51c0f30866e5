"""Dockerfiles as stages of instructions, and what of a build's context they see."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.rendering import ROOT

__all__ = ["IMAGES", "Stage", "faults_of_dockerfile", "is_in_context", "stages"]

IMAGES = ROOT / "deploy" / "images"
# A compiler in an image that serves needs a reason; Triton's is one.
_BUILD_TOOLS = re.compile(r"\b(gcc|g\+\+|make|build-essential|git|curl)\b")
_MAY_COMPILE = frozenset({"hypic-worker-gpu"})


@dataclass(slots=True)
class Stage:
    """From one FROM to the next."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        """The arguments of each such instruction."""
        return [arguments for name, arguments in self.instructions if name == instruction]


def stages(text: str) -> list[Stage]:
    """In order.

    Raises:
        ValueError: an instruction stands before the first FROM, or is none.
    """
    found: list[Stage] = []
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, (each.strip() for each in joined.split("\n"))):
        instruction, _, arguments = line.partition(" ")
        if not re.fullmatch(r"[A-Z]+", instruction):
            raise ValueError(f"{line!r} is no instruction")
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            found.append(Stage(base.strip(), name.strip()))
        elif not found:
            raise ValueError(f"{line!r} stands before FROM")
        else:
            found[-1].instructions.append((instruction, arguments.strip()))
    return found


def faults_of_dockerfile(text: str, targets: Sequence[str]) -> list[str]:
    """What is wrong with the stages, and with the images that `targets` of them make."""
    found = stages(text)
    by_name = {stage.name: stage for stage in found}
    faults = [fault for stage in found for fault in _faults_of_stage(stage, by_name)]
    for target in targets:
        faults += _faults_of_image(list(_lineage(by_name[target], by_name)))
    return faults


def is_in_context(path: str) -> bool:
    """Whether `.dockerignore` lets a path of the repository through; the last rule that matches counts."""
    is_ignored = False
    for rule in (ROOT / ".dockerignore").read_text().split("\n"):
        pattern = rule.removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = pattern.removeprefix("**/")
        candidates = Path(path).parts if anywhere != pattern else _prefixes(path)
        if any(fnmatch.fnmatch(each, anywhere) for each in candidates):
            is_ignored = not rule.startswith("!")
    return not is_ignored


def _prefixes(path: str) -> Iterator[str]:
    parts = Path(path).parts
    return ("/".join(parts[:length]) for length in range(1, len(parts) + 1))


def _lineage(stage: Stage, by_name: dict[str, Stage]) -> Iterator[Stage]:
    yield stage
    while stage.base in by_name:
        stage = by_name[stage.base]
        yield stage


def _faults_of_stage(stage: Stage, by_name: dict[str, Stage]) -> Iterator[str]:
    name, _, tag = stage.base.rpartition(":")
    if stage.base not in by_name and (not name or tag == "latest" or not re.search(r"\d+\.\d+\.\d+", tag)):
        yield f"base {stage.base} is not pinned"
    for arguments in [*stage.of("COPY"), *stage.of("ADD")]:
        words = arguments.split()
        if words[0].startswith("--from="):
            if words[0].removeprefix("--from=") not in by_name:
                yield f"{words[0]} is no stage"
            continue
        for source in words[:-1]:
            if not (ROOT / source).exists():
                yield f"{source} does not exist"
            elif not is_in_context(source):
                yield f"{source} is left out by .dockerignore"


def _faults_of_image(lineage: list[Stage]) -> Iterator[str]:
    labels = " ".join(label for stage in lineage for label in stage.of("LABEL"))
    title = re.search(r'image\.title="([^"]+)"', labels)
    name = title[1] if title else lineage[0].name
    user = next((user for stage in lineage for user in reversed(stage.of("USER"))), "0")
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        yield f"{name} runs as {user}"
    for label in ("title", "description", "version", "licenses"):
        if f'org.opencontainers.image.{label}="' not in labels:
            yield f"{name} has no label {label}"
    if any(stage.of("HEALTHCHECK") for stage in lineage):
        yield f"{name} has a health check beside its probes"
    if not any(stage.of("ENTRYPOINT") for stage in lineage):
        yield f"{name} has no entry point"
    commands = " ".join(command for stage in lineage for command in stage.of("RUN"))
    if "pip install" in commands or (_BUILD_TOOLS.search(commands) and name not in _MAY_COMPILE):
        yield f"{name} has build tools"
