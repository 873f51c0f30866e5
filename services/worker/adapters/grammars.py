"""Grammars of replies by llguidance: tried in a process of its own, compiled beside the loop, followed beside the engine."""

import asyncio
import json
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypic.v1 import worker_pb2

from services.common.errors import InvalidRequestError
from services.worker.engine.grammar import TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler"]

# Of a process that tries a grammar before this one compiles it.
_TRIAL_CPU_SECONDS, _TRIAL_BYTES = 5, 1 << 29
_COMPILE_SECONDS = 20.0
# A mask takes microseconds; the device waits for one that is late.
_MASK_SECONDS = 5.0
_MAX_SOURCE_BYTES = 1 << 17
_NUM_KEPT = 32
_TOO_DEAR = "takes too long or too much memory to compile; make it smaller, or bound what it repeats"
_NOT_INSTALLED = "grammar: this worker has no grammar library; install hypic with the extra `grammars` on it"


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer; the last ones are kept. Of the event loop's thread."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._stop_ids = [token for token in stop_token_ids if token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiles = ThreadPoolExecutor(2, thread_name_prefix="grammar-compile")
        self._masks = ThreadPoolExecutor(2, thread_name_prefix="grammar-mask")
        self._trials = asyncio.Semaphore(2)
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    async def compile(self, request: worker_pb2.GenerateRequest) -> TokenGrammar | None:
        """What a request's reply is held to; its first mask is under way.

        Raises:
            InvalidRequestError: it is no grammar, the library cannot honour it, it takes too long, or there is no library.
        """
        if not request.HasField("grammar"):
            return None
        _require_library()
        grammar = request.grammar
        kind = grammar.WhichOneof("form")
        if kind is None:
            raise InvalidRequestError("grammar: it has no form")
        key = (kind, str(getattr(grammar, kind)))
        if len(key[1].encode()) > _MAX_SOURCE_BYTES:
            raise InvalidRequestError(f"grammar: must have at most {_MAX_SOURCE_BYTES} bytes; make it smaller")
        matcher = self._kept.pop(key, None) or await self._compile(*key)
        self._kept[key] = matcher
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return _Following(matcher.deep_copy(), self._masks)

    async def _compile(self, kind: str, text: str) -> "LLMatcher":
        async with self._trials:
            fault = await _try(kind, text)
        if fault:
            raise InvalidRequestError(f"grammar: {_brief(fault)}")
        work = asyncio.get_running_loop().run_in_executor(self._compiles, self._build, kind, text)
        try:
            async with asyncio.timeout(_COMPILE_SECONDS):
                return await work
        except TimeoutError:
            raise InvalidRequestError(f"grammar: {_TOO_DEAR}") from None

    def _build(self, kind: str, text: str) -> "LLMatcher":
        from services.worker.adapters.grammar_sources import build_matcher

        try:
            return build_matcher(self._get_tokenizer(), kind, text)
        except ValueError as error:
            raise InvalidRequestError(f"grammar: {_brief(str(error))}") from error

    def _get_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._stop_ids:
            raise InvalidRequestError("grammar: the model has no stop token, so that no reply could end")
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._tokenizer_json.decode(), self._vocab_size, self._stop_ids)
            return self._tokenizer


class _Following:
    """See `TokenGrammar`: the next mask is computed while the device is busy with the next step."""

    def __init__(self, matcher: "LLMatcher", masks: Executor) -> None:
        self._matcher = matcher
        self._masks = masks
        self._next: Future[torch.Tensor] = masks.submit(self._guard, self._find_allowed)

    def allowed(self) -> torch.Tensor:
        """See `TokenGrammar`."""
        try:
            return self._next.result(_MASK_SECONDS)
        except TimeoutError:
            raise ValueError("the grammar's next tokens took too long to find") from None

    def accept(self, token: int) -> None:
        """See `TokenGrammar`."""
        self._next = self._masks.submit(self._guard, lambda: self._advance(token))

    def _advance(self, token: int) -> torch.Tensor:
        self._matcher.consume_token(token)
        return self._find_allowed()

    def _find_allowed(self) -> torch.Tensor:
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8) != 0
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {_brief(self._matcher.get_error())}")
        return torch.from_numpy(allowed)

    def _guard(self, find: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A panic of the library is no `Exception`; it ends this reply, and not the engine."""
        try:
            return find()
        except ValueError:
            raise
        except BaseException as error:
            raise ValueError(f"the grammar library failed: {_brief(str(error))}") from error


def _require_library() -> None:
    try:
        import llguidance  # noqa: F401 # only whether it is there
    except ImportError:
        raise InvalidRequestError(_NOT_INSTALLED) from None


async def _try(kind: str, text: str) -> str:
    """Why a grammar cannot be honoured; empty where a process with bounds of its own could compile it and follow it a little."""
    bounds = (str(_TRIAL_CPU_SECONDS), str(_TRIAL_BYTES))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker.grammar_trial", *bounds, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        said, _ = await process.communicate(json.dumps({"kind": kind, "text": text}).encode())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        return _TOO_DEAR
    fault: str = json.loads(said)
    return fault


def _brief(text: str) -> str:
    """What stands ahead of the library's drawings of places, on one line."""
    return " ".join(text.split())[:300]
