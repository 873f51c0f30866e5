"""Grammars of replies by llguidance: compiled beside the event loop, followed beside the engine's thread."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypic.v1 import worker_pb2

from services.common.errors import InvalidRequestError
from services.worker.engine.grammar import TokenGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarCompiler"]

_COMPILE_SECONDS = 10.0
# A mask takes microseconds, and is bounded by the limits below; the device waits for one that is late.
_MASK_SECONDS = 10.0
_MAX_SOURCE_BYTES = 1 << 17
_NUM_KEPT = 32
# So that a reply that loses its way in blanks comes back to its form.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
_MAX_LEXER_STATES, _MAX_GRAMMAR_SIZE = 50_000, 200_000
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
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()

    async def compile(self, request: worker_pb2.GenerateRequest) -> TokenGrammar | None:
        """What a request's reply is held to; its first mask is under way.

        Raises:
            InvalidRequestError: it is no grammar, the library cannot honour it, it takes too long, or there is no library.
        """
        if not request.HasField("grammar"):
            return None
        key = request.grammar.SerializeToString(deterministic=True)
        if len(key) > _MAX_SOURCE_BYTES:
            raise InvalidRequestError(f"grammar: must have at most {_MAX_SOURCE_BYTES} bytes; make it smaller")
        matcher = self._kept.pop(key, None) or await self._compile(request.grammar)
        self._kept[key] = matcher
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return _Following(matcher.deep_copy(), self._masks)

    async def _compile(self, grammar: worker_pb2.Grammar) -> "LLMatcher":
        work = asyncio.get_running_loop().run_in_executor(self._compiles, self._build, grammar)
        try:
            return await asyncio.wait_for(work, _COMPILE_SECONDS)
        except TimeoutError:
            raise InvalidRequestError(
                f"grammar: takes longer than {_COMPILE_SECONDS:.0f} s to compile; make it smaller"
            ) from None

    def _build(self, grammar: worker_pb2.Grammar) -> "LLMatcher":
        try:
            import llguidance
        except ImportError:
            raise InvalidRequestError(_NOT_INSTALLED) from None
        limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
        )
        try:
            source = _source(grammar)
        except ValueError as error:
            raise InvalidRequestError(f"grammar: {_brief(str(error))}") from error
        matcher = llguidance.LLMatcher(self._get_tokenizer(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequestError(f"grammar: {_brief(matcher.get_error())}")
        return matcher

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


def _source(grammar: worker_pb2.Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    kind = grammar.WhichOneof("form")
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.json_schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.regex)
    if kind == "choices":
        return grammar_from("choice", grammar.choices)
    if kind == "grammar":
        return grammar_from("grammar", grammar.grammar)
    raise ValueError("it has no form")


def _brief(text: str) -> str:
    """What stands ahead of the library's drawings of places, on one line."""
    return " ".join(text.split())[:300]
