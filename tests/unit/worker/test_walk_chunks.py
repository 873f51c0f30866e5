"""How long the chunks of a walk are."""

import pytest

from services.worker.ops.recurrence.chunks import walk_chunk_tokens


@pytest.mark.parametrize(
    ("run_lengths", "tokens"),
    [
        ([8] * 16 + [64], 16),
        ([8, 8, 300], 64),
        ([2048], 64),
        ([16], 16),
        ([], 16),
    ],
    ids=["seams", "long-question", "live", "one-short", "none"],
)
def test_short_chunks_where_they_are_hardly_more(run_lengths: list[int], tokens: int) -> None:
    assert walk_chunk_tokens(run_lengths, of_channels=False) == tokens
    assert walk_chunk_tokens(run_lengths, of_channels=True) == 16
