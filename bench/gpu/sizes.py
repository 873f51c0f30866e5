"""How large prompts, batches and traces are."""

from dataclasses import dataclass

__all__ = ["TINY", "TRUE", "Sizes"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all subjects.

    segments, many_segments: of a prompt, of `segment_tokens` each; short_tokens: of a short segment; seam_window,
    prime_tokens: of the profile; waiting: requests of one batch of combines; readers: requests that decode together;
    rounds: how often a figure is taken behind a first time, which compiles; recomputed: lengths of full recomputes.
    documents, shortest, longest, distinct: of the mixed trace, `sampled` requests of which are measured.
    """

    segments: int = 16
    many_segments: int = 64
    segment_tokens: int = 2048
    short_tokens: int = 512
    system_tokens: int = 512
    question_tokens: int = 64
    prime_tokens: int = 64
    seam_window: int = 8
    page_tokens: int = 64
    waiting: int = 16
    readers: int = 64
    decode_steps: int = 32
    rounds: int = 5
    recomputed: tuple[int, ...] = (512, 8192, 32768)
    documents: int = 1000
    shortest: int = 512
    longest: int = 4096
    distinct: int = 8
    sampled: int = 24

    @property
    def prompt_tokens(self) -> int:
        """Documents of a prompt of `segments`."""
        return self.segments * self.segment_tokens


TRUE = Sizes()
# What a CPU manages in seconds.
TINY = Sizes(
    segments=3,
    many_segments=6,
    segment_tokens=40,
    short_tokens=24,
    system_tokens=16,
    question_tokens=5,
    prime_tokens=4,
    seam_window=4,
    page_tokens=8,
    waiting=3,
    readers=4,
    decode_steps=4,
    rounds=1,
    recomputed=(24, 120),
    documents=30,
    shortest=16,
    longest=48,
    distinct=3,
    sampled=3,
)
