"""Result files: rows of a subject take the place of earlier ones, and every subject keeps where its own come from."""

import json
from pathlib import Path

import pytest

from bench import results
from bench.results import Row, merge_results, of_subject, read_results


@pytest.fixture(autouse=True)
def commits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The present commit is the first of these."""
    names = ["first"]
    monkeypatch.setattr(results, "_commit", lambda: names[0])
    return names


def test_a_subject_that_is_measured_again_leaves_nothing_of_itself(tmp_path: Path, commits: list[str]) -> None:
    path = tmp_path / "results.json"
    merge_results(path, "make a", "CPU", "a", [Row("x", 1.0, "s"), Row("y", 2.0, "s")])
    commits[0] = "second"
    merge_results(path, "make b", "CPU", "b", [Row("x", 3.0, "s")])
    assert read_results(path).commit == "first, second"
    commits[0] = "third"
    merge_results(path, "make a --again", "CPU", "a", [Row("x", 4.0, "s")])
    found = read_results(path)
    assert (found.commit, found.command) == ("second, third", "make b; make a --again")
    assert [(row.measure, row.value) for row in found.rows] == [("b: x", 3.0), ("a: x", 4.0)]
    assert (of_subject(found, "a").commit, of_subject(found, "b").commit) == ("third", "second")
    assert of_subject(found, "b").command == "make b"
    # Another device's rows stand with none of these.
    merge_results(path, "make a", "GPU", "a", [Row("x", 5.0, "s")])
    assert [row.value for row in read_results(path).rows] == [5.0]


def test_a_file_that_does_not_tell_its_subjects_apart(tmp_path: Path, commits: list[str]) -> None:
    """Its rows keep all that it names until each subject is measured again."""
    path = tmp_path / "results.json"
    merge_results(path, "make a", "CPU", "a", [Row("x", 1.0, "s")])
    merge_results(path, "make b", "CPU", "b", [Row("x", 1.0, "s")])
    content = json.loads(path.read_text())
    del content["sources"]
    content["commit"] = "old, older"
    path.write_text(json.dumps(content))
    merge_results(path, "make b", "CPU", "b", [Row("x", 2.0, "s")])
    assert of_subject(read_results(path), "a").commit == "old, older"
    merge_results(path, "make a", "CPU", "a", [Row("x", 2.0, "s")])
    assert read_results(path).commit == "first"
