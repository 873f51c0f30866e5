"""A fault is planted in a served worker: composed answers are far off, the guard sees it, and answers come out right again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack.asking import ask
from tests.e2e.stack.planted import Fault, FaultSwitch
from tests.e2e.stack.served import ServedStack, wait_until
from train.data import Question, questions

DEMO = Path(__file__).parents[3] / "models" / "demo"
NUM_QUESTIONS = 6
MOST_SAMPLES = 200


@dataclass(slots=True)
class Watched:
    """A stack whose guard looks at every request."""

    stack: ServedStack
    switch: FaultSwitch
    asked: list[Question]
    num_asked: int = 0

    def quality(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stack.http.get("/admin/quality").json()
        return found

    def ask(self) -> tuple[str, list[str | None]]:
        """One more request, with its comparison: the answer, and the documents' reasons."""
        before = sum(self.quality()["samples"].values())
        question = self.asked[self.num_asked % len(self.asked)]
        self.num_asked += 1
        documents = [{"title": each.title, "text": each.text} for each in question.documents[:2]]
        answer = ask(self.stack, documents, question.question, max_tokens=2)
        wait_until(lambda: sum(self.quality()["samples"].values()) > before, 120)
        return answer.text, [part["reason"] for part in answer.segments]

    def ask_until(self, mode: str) -> int:
        """Requests until the one tag is in this mode."""
        for number in range(1, MOST_SAMPLES + 1):
            self.ask()
            (tag,) = self.quality()["tags"]
            if tag["mode"] == mode:
                return number
        raise AssertionError(f"not {mode} after {MOST_SAMPLES} samples: {self.quality()}")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if not (DEMO / "model.safetensors").exists():
        pytest.skip("needs the demo model's weights")
    folder = tmp_path_factory.mktemp("guarded")
    switch = FaultSwitch(folder)
    with ServedStack(DEMO, folder / "log", {**switch.variables, "HYPIC_ROUTER_GUARD_SHARE": "1"}) as stack:
        yield Watched(stack, switch, list(questions(7, NUM_QUESTIONS)))


def test_a_wrong_transition_makes_the_tag_do_without_composing_until_it_is_gone(watched: Watched) -> None:
    right = [watched.ask()[0] for _ in range(NUM_QUESTIONS)]
    (healthy,) = watched.quality()["tags"]
    assert healthy["mean_divergence_nats"] < healthy["budget_nats"]

    watched.switch.plant(Fault.TRANSITION)
    watched.ask_until("exact")
    (event,) = watched.quality()["events"]
    assert (event["mode"], event["cause"], event["tag"]) == ("exact", "divergence", "other")
    assert event["num_samples"] <= NUM_QUESTIONS + MOST_SAMPLES
    again = [watched.ask() for _ in range(NUM_QUESTIONS)]
    assert {reason for _, reasons in again for reason in reasons} == {"quality_guard"}
    # The fault is there still, and no answer shows it.
    assert sorted(text for text, _ in again) == sorted(right)
    assert watched.quality()["tags"][0]["mean_divergence_nats"] > healthy["mean_divergence_nats"]

    watched.switch.heal()
    watched.ask_until("compose")
    assert [each["cause"] for each in watched.quality()["events"]] == ["recovery", "divergence"]
    assert "quality_guard" not in watched.ask()[1]
    watched.stack.wait_idle()
