"""Every family through router, cache service and worker: computed, captured, composed in another order, decoded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.one_prompt import PromptText
from services.worker.inspection.families import FAMILY_NOTES
from services.worker.models.registry import read_checkpoint_spec
from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.families import ChangingStack, public_reply, write_family
from tests.models import VARIANTS, CheckpointFactory, Variant

DEMO = Path(__file__).parents[3] / "models" / "demo"
SYSTEM, QUESTION = "Answer from the documents.", "What opens?"
NUM_TOKENS = 4
NAMES = (
    "qwen3_5-standard",
    "qwen3_5_moe-standard",
    "qwen3_next-standard",
    "llama-scaled",
    "qwen3-dense",
    "kimi_linear-standard",
    "minimax-standard",
    "ring-linear-group",
    "ring-2.5-low-rank",
)
SERVED = [variant for variant in VARIANTS if variant.name in NAMES]


def test_no_family_is_left_out(checkpoints: CheckpointFactory) -> None:
    served = [read_checkpoint_spec(checkpoints.directory(variant)).family for variant in SERVED]
    assert sorted(served) == sorted(notes.name for notes in FAMILY_NOTES)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangingStack]:
    """Router and cache service of all families: each one follows another's entries and finds none of its own."""
    with ChangingStack(tmp_path_factory.mktemp("families") / "log") as stack:
        yield stack


@pytest.mark.parametrize("variant", SERVED, ids=lambda variant: variant.name)
def test_a_family_is_served(variant: Variant, changing: ChangingStack, tmp_path: Path) -> None:
    checkpoint = tmp_path / variant.name
    public = write_family(variant, checkpoint, DEMO)
    asked = [document(str(index), num_words=40) for index in range(3)]
    text = PromptText(QUESTION, [(each["title"], each["text"]) for each in asked], SYSTEM)
    with changing.serving(checkpoint):

        def reply(documents: list[dict[str, str]], **more: str) -> Answer:
            return ask(changing, documents, QUESTION, max_tokens=NUM_TOKENS, **more)

        off = reply(asked, reuse="off")
        assert off.cached_tokens == 0
        assert off.text == public_reply(public, checkpoint, text, NUM_TOKENS)
        assert reply(asked, reuse="exact").text == off.text
        cold = reply(asked)
        assert cold.served == ["cold"] * 3
        turned = reply(asked[::-1])
        assert turned.served == ["hit"] * 3
        assert turned.cached_tokens > turned.prompt_tokens / 2
        again = reply(asked)
        assert (again.served, again.text) == (["hit"] * 3, cold.text)
