"""Background processes that write whole batches into shared memory."""

import mmap
import multiprocessing
import os
import random
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.prompts import PromptEncoder
from train.data.rows import ROW_LENGTHS, build_row

_EARLY = (0.55, 0.45, 0.0, 0.0)
_LATE = (0.10, 0.30, 0.35, 0.25)


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` and `is_reply` `[tokens]`: rows of `row_length` tokens one after another."""

    ids: NDArray[np.uint16]
    is_reply: NDArray[np.uint8]
    row_length: int


class Loader:
    """Serves batches of `tokens` tokens; start it before the device is touched (it forks).

    Batches begin as short rows of few documents; `set_difficulty` leads to the final mix.
    """

    def __init__(self, tokenizer_file: Path, tokens: int, workers: int, seed: int, slots: int = 48) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context = multiprocessing.get_context("fork")
        self._tokens = tokens
        self._memory = mmap.mmap(-1, slots * tokens * 3)
        self._free: Queue[int] = context.Queue()
        self._ready: Queue[tuple[int, int]] = context.Queue()
        self._difficulty = context.Value("d", 0.0)
        for slot in range(slots):
            self._free.put(slot)
        self._workers = [
            context.Process(target=self._work, args=(tokenizer_file, seed + i), daemon=True) for i in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def set_difficulty(self, difficulty: float) -> None:
        """Where the workers stand between the first mix of rows (0) and the final one (1)."""
        self._difficulty.value = difficulty

    def next(self) -> Batch:
        """The next batch, copied out of the shared memory."""
        slot, row_length = self._ready.get()
        ids, is_reply = self._views(slot)
        batch = Batch(ids.copy(), is_reply.copy(), row_length)
        self._free.put(slot)
        return batch

    def stop(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.terminate()

    def _views(self, slot: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        start = slot * self._tokens * 3
        ids = np.frombuffer(self._memory, np.uint16, self._tokens, start)
        is_reply = np.frombuffer(self._memory, np.uint8, self._tokens, start + 2 * self._tokens)
        return ids, is_reply

    def _work(self, tokenizer_file: Path, seed: int) -> None:
        rng = random.Random(f"train/{seed}")
        encoder = PromptEncoder(tokenizer_file)
        while True:
            slot = self._free.get()
            ids, is_reply = self._views(slot)
            late = self._difficulty.value
            mix = [e + (x - e) * late for e, x in zip(_EARLY, _LATE, strict=True)]
            length = rng.choices(ROW_LENGTHS, mix)[0]
            for start in range(0, self._tokens, length):
                row = build_row(rng, encoder, length, ease=1 - late)
                ids[start : start + length] = row.ids
                is_reply[start : start + length] = row.is_reply
            self._ready.put((slot, length))
