"""A shape as a checkpoint that routers and workers can read."""

import json
from pathlib import Path

import pytest

from bench.traffic.stack import StackPlan, write_shape
from services.cli.supervisor import StackStartError
from services.router.adapters.tokenizer import TwoWayTokenizer

TINY = Path(__file__).parents[3] / "bench" / "gpu" / "tiny"


def test_every_id_of_a_shape_is_spelled_and_text_keeps_its_tokens(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    config["text_config"]["vocab_size"] = 9000
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_shape(source, tmp_path / "shape")
    own = TwoWayTokenizer((tmp_path / "shape" / "tokenizer.json").read_bytes())
    demo = TwoWayTokenizer((TINY.parents[2] / "models" / "demo" / "tokenizer.json").read_bytes())
    text = "the old bridge of the town was opened in 1903"
    assert own.encode_plain(text) == demo.encode_plain(text)
    assert all(own.new_detokenizer().push([token_id]) for token_id in (5000, 6143, 6144, 8999))


def test_a_vocabulary_that_is_too_small_is_told(tmp_path: Path) -> None:
    with pytest.raises(StackStartError, match="vocab_size 512 is too small"):
        write_shape(TINY, tmp_path / "shape")


def test_a_directory_promises_no_more_than_the_engine_keeps() -> None:
    plan = StackPlan(TINY, state_bytes=600, page_bytes=400)
    assert plan.budget_bytes == 850
    assert StackPlan(TINY, state_bytes=600, page_bytes=400, host_bytes=5000).budget_bytes == 5000
