"""Composed and plain requests in one vLLM: nothing of one reaches another, whatever is aborted, lost, refused or preempted.

Composed states are random bytes here (`states.py`): where they leak, answers change.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypic_vllm.claims import salt_of

from bench.vllm.server import RunningVllm, find_python, serve_vllm
from eval.prompts import PromptReader
from eval.question_sets import QuestionSet, SetKind, read_questions
from services.blob.revision import checkpoint_revision
from tests.vllm.states import StateGiver, give_states

_CHECKPOINT = Path(__file__).parents[2] / "models" / "demo"
_END = 2
_BLOCK = 384
# In units of the natural logarithm.
_DECIDED = 1.0
_MOST_ROUNDS = 30
_CACHING = ("--enable-prefix-caching", "--no-enable-prefix-caching")
# With cached prefixes three requests fit, else two: fewer of them meet at the moment that counts.
_FEW_BLOCKS = {_CACHING[0]: "20", _CACHING[1]: "14"}
_CHUNKED = ("--enable-chunked-prefill", "--max-num-batched-tokens", "512")
_WHOLE = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192")
# vLLM itself refuses to cache prefixes of hybrid models without chunked prefill.
_WAYS = {
    "cached-chunked": (_CACHING[0], *_CHUNKED),
    "chunked": (_CACHING[1], *_CHUNKED),
    "whole": (_CACHING[1], *_WHOLE),
}
_LIMITS = {"max_tokens": 24, "ignore_eos": True, "stop_token_ids": [_END]}
Ask = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rig:
    """vLLM, and whoever gives it states."""

    vllm: RunningVllm
    giver: StateGiver

    def plain(self, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:  # noqa: ANN401
        return self.vllm.complete(token_ids, **_LIMITS, **more)

    def composed(self, token_ids: tuple[int, ...], seed: int) -> dict[str, Any]:
        return self.vllm.complete(token_ids, **_LIMITS, **self.giver.offer(token_ids, seed))

    def wait_free(self) -> None:
        """No request is left, and no block in use."""
        give_up = time.monotonic() + 60
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        while any(self.vllm.metric(name) for name in names):
            assert time.monotonic() < give_up, {name: self.vllm.metric(name) for name in names}
            time.sleep(0.1)


@contextmanager
def _run(log: Path, arguments: Sequence[str]) -> Iterator[Rig]:
    python = find_python()
    assert python is not None
    with (
        give_states(checkpoint_revision(_CHECKPOINT)) as giver,
        serve_vllm(python, _CHECKPOINT, log, arguments) as vllm,
    ):
        yield Rig(vllm, giver)


@pytest.fixture(scope="module", params=_WAYS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with _run(tmp_path_factory.mktemp("vllm") / "log", _WAYS[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def candidates() -> list[tuple[int, ...]]:
    reader = PromptReader(_CHECKPOINT)
    questions = read_questions(QuestionSet(SetKind.STANDARD, 12, 4711))
    return [prompt.token_ids for prompt in reader.read(questions)]


@pytest.fixture
def prompts(rig: Rig, candidates: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Four as they are; and of two the ends, so that their states end with a block, as `align` caches it, or one token on."""
    ends = [ids[-(_BLOCK * 3 + more) :] for ids in candidates for more in (1, 2)]
    return [*_decided(rig, candidates, 4), *_decided(rig, ends, 2)]


def _decided(rig: Rig, candidates: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Prompts of whose replies every token is far ahead of the next: near ties fall either way with the batch they run in."""
    found: list[tuple[int, ...]] = []
    for ids in candidates:
        reply = rig.plain(ids, cache_salt="chosen", logprobs=2)
        tops = [sorted(top.values())[-2:] for top in reply["choices"][0]["logprobs"]["top_logprobs"]]
        if all(best - second > _DECIDED for second, best in tops):
            found.append(ids)
        if len(found) == count:
            return found
    raise AssertionError("too few prompts whose replies are decided")


def _ids(reply: dict[str, Any]) -> list[int]:
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def _cached(reply: dict[str, Any]) -> int:
    details = reply["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _at_once(asked: Sequence[Ask]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(asked)) as threads:
        return [each.result() for each in [threads.submit(ask) for ask in asked]]


def test_what_is_composed_reaches_no_other_request(rig: Rig, prompts: list[tuple[int, ...]]) -> None:
    composed = [rig.composed(ids, seed) for seed, ids in enumerate(prompts)]
    assert [_cached(reply) for reply in composed] == [len(ids) - 1 for ids in prompts]
    for index, (ids, reply) in enumerate(zip(prompts, composed, strict=True)):
        plain = rig.plain(ids, cache_salt=f"alone-{index}")
        assert _cached(plain) == 0
        assert _ids(plain) != _ids(reply), "a state that changes nothing would prove nothing"
    for handle, (ids, _) in list(rig.giver.states.items()):
        again = rig.plain((*ids, 5), cache_salt=salt_of(handle))
        assert _cached(again) == 0, "composed blocks are found under their salt after their request"
    # vLLM's own replies behind its own hits are not always those that it computes afresh, so its cache is as full as it gets.
    for _ in range(2):
        baseline = [_ids(rig.plain(ids)) for ids in prompts]
    # The first token is drawn from the state as it was given, whatever runs beside it.
    firsts = [_ids(reply)[0] for reply in composed]
    for _ in range(2):
        asked: list[Ask] = []
        for seed, ids in enumerate(prompts):
            asked += [partial(rig.plain, ids), partial(rig.composed, ids, seed)]
        replies = _at_once(asked)
        assert [_ids(reply) for reply in replies[::2]] == baseline
        assert [_cached(reply) for reply in replies[1::2]] == [len(ids) - 1 for ids in prompts]
        assert (
            sum(_ids(reply)[0] == first for reply, first in zip(replies[1::2], firsts, strict=True)) > len(firsts) // 2
        )
    rig.wait_free()


def test_what_does_not_come_is_computed(rig: Rig, prompts: list[tuple[int, ...]]) -> None:
    """Read before, given up, damaged, of other tokens, from nobody, or under another salt: vLLM's own answer."""
    ids = prompts[0]
    baseline = _ids(rig.plain(ids, cache_salt="afresh"))
    spent = rig.giver.offer(ids, 1)
    rig.vllm.complete(ids, **_LIMITS, **spent)
    other = rig.giver.offer((*ids[:-2], 7, ids[-1]), 1)
    unknown = rig.giver.offer(ids, 1)
    rig.giver.states.popitem()
    nobody = rig.giver.offer(ids, 1)
    nobody["kv_transfer_params"]["hypic"]["address"] = "127.0.0.1:1"
    foreign = rig.giver.offer(ids, 1)
    foreign["kv_transfer_params"]["hypic"]["address"] = "192.0.2.1:7102"
    salted = rig.giver.offer(ids, 1) | {"cache_salt": "another"}
    short = rig.giver.offer(ids, 1)
    short["kv_transfer_params"]["hypic"]["num_tokens"] -= 1
    for offer in (spent, other, unknown, nobody, foreign, salted, short):
        assert _ids(rig.vllm.complete(ids, **_LIMITS, **offer)) == baseline, offer
    rig.giver.spoils = True
    try:
        assert _ids(rig.composed(ids, 1)) == baseline
    finally:
        rig.giver.spoils = False
    rig.wait_free()


def test_an_abort_in_the_middle_of_loading_frees_everything(rig: Rig, prompts: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        baseline = [_ids(rig.plain(ids)) for ids in prompts[:3]]
    rig.giver.holds_back = True
    before = rig.giver.num_left
    try:
        leaving = [_begin(rig, ids) for ids in prompts[:4]]
        give_up = time.monotonic() + 60
        while rig.vllm.metric("vllm:kv_cache_usage_perc") == 0:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        beside = [_ids(reply) for reply in _at_once([partial(rig.plain, ids) for ids in prompts[:3]])]
        assert beside == baseline
        for connection in leaving:
            connection.close()
        while rig.giver.num_left < before + len(leaving):
            assert time.monotonic() < give_up, "the worker must hear that nobody waits"
            time.sleep(0.05)
    finally:
        rig.giver.holds_back = False
    rig.wait_free()
    assert [_ids(rig.plain(ids)) for ids in prompts[:3]] == baseline


def _begin(rig: Rig, ids: tuple[int, ...]) -> socket.socket:
    """A request whose client may leave at any time."""
    host, _, port = rig.vllm.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "demo", "prompt": list(ids), **_LIMITS, **rig.giver.offer(ids, 3)}).encode()
    connection = socket.create_connection((host, int(port)), 30)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("caching", _CACHING)
def test_preempted_requests_change_no_plain_token(
    caching: str, tmp_path: Path, candidates: list[tuple[int, ...]]
) -> None:
    """Requests that fit together, until each of them wants one more block behind its third token."""
    ends = [ids[-(_BLOCK * 3 - 3) :] for ids in candidates]
    arguments = [
        caching,
        "--num-gpu-blocks-override",
        _FEW_BLOCKS[caching],
        "--max-num-batched-tokens",
        "8192",
        "--max-model-len",
        "1600",
    ]
    with _run(tmp_path / "log", arguments) as rig:
        chosen = _decided(rig, [ids for ids in ends if len(_ids(rig.plain(ids))) > 4], 3)
        for _ in range(2):
            alone = [_ids(rig.plain(ids)) for ids in chosen]
        # How requests meet is the machine's to say; that some are preempted is only a matter of rounds.
        for number in range(_MOST_ROUNDS):
            asked: list[Ask] = []
            for seed, ids in enumerate(chosen):
                asked += [partial(rig.plain, ids), partial(rig.composed, ids, seed)]
            assert [_ids(reply) for reply in _at_once(asked)][::2] == alone
            if number > 2 and rig.vllm.metric("vllm:num_preemptions_total"):
                break
        assert rig.vllm.metric("vllm:num_preemptions_total") > 0
        rig.wait_free()


@pytest.mark.parametrize(
    ("arguments", "connector", "reason"),
    [
        (("--dtype", "float32"), {}, "dtype is float32"),
        ((), {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy is fail"),
        ((), {"kv_role": "kv_both"}, "kv_role is kv_both"),
        ((), {"kv_connector_extra_config": {}}, "kv_connector_extra_config.workers"),
        (("--disable-hybrid-kv-cache-manager",), {}, "disable_hybrid_kv_cache_manager"),
    ],
)
def test_engines_that_are_not_known_do_not_start(
    arguments: tuple[str, ...], connector: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    python, log = find_python(), tmp_path / "log"
    assert python is not None
    with pytest.raises(RuntimeError), serve_vllm(python, _CHECKPOINT, log, arguments, connector):
        pass
    assert reason in log.read_text()
