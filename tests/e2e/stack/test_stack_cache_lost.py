"""The cache service is killed or stopped under requests: they are answered all the same, and right."""

import signal
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.stack.asking import ask, body, document, read_stream, stream
from tests.e2e.stack.served import ServedStack, wait_until


def test_a_killed_cache_service_is_done_without_and_learns_again(fragile: ServedStack) -> None:
    asked = [document(f"cache killed {index}") for index in range(2)]
    recomputed = ask(fragile, asked, reuse="off").text
    composed = ask(fragile, asked).text
    assert composed != recomputed
    captured = fragile.captures()
    # Stopped first, so that it cannot come back before the request has been answered.
    fragile.signal("cache", signal.SIGSTOP)
    without = ask(fragile, asked)
    assert without.text == recomputed
    assert {part["reason"] for part in without.segments} == {"cache_unavailable"}
    killed = fragile.kill("cache")
    fragile.wait_restarted("cache", killed)
    # Heartbeats tell the new directory what the worker holds.
    wait_until(lambda: fragile.gauge("cache", "hypic_cache_entries") >= 2)
    again = ask(fragile, asked)
    assert again.served == ["hit", "hit"]
    assert again.text == composed
    assert fragile.captures() == captured
    fragile.wait_idle()


def test_requests_while_the_cache_service_comes_back(fragile: ServedStack) -> None:
    asked = [document("cache comes back")]
    composed, recomputed = ask(fragile, asked).text, ask(fragile, asked, reuse="off").text
    killed = fragile.kill("cache")

    def is_hit() -> bool:
        answer = ask(fragile, asked)
        assert answer.text == (recomputed if answer.served == ["live"] else composed)
        return answer.served == ["hit"]

    wait_until(is_hit)
    fragile.wait_restarted("cache", killed)
    fragile.wait_idle()


def test_a_stopped_cache_service_costs_one_timeout(fragile: ServedStack) -> None:
    asked = [document("cache stopped")]
    composed, recomputed = ask(fragile, asked).text, ask(fragile, asked, reuse="off").text
    fragile.signal("cache", signal.SIGSTOP)
    try:
        for _ in range(2):
            answer = ask(fragile, asked)
            assert answer.text == recomputed
            assert answer.segments[0]["reason"] == "cache_unavailable"
            assert 0.5 < answer.raw["hypic"]["seconds"]["plan"] < 5
    finally:
        fragile.signal("cache", signal.SIGCONT)
    wait_until(lambda: ask(fragile, asked).served == ["hit"])
    assert ask(fragile, asked).text == composed
    fragile.wait_idle()


def test_a_cache_service_killed_between_plan_and_generate(fragile: ServedStack) -> None:
    known, new = [document("cache between")], [document("cache between, new")]
    composed = ask(fragile, known).text
    fragile.wait_idle()
    fragile.signal("worker", signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            hit, cold = (pool.submit(ask, fragile, asked) for asked in (known, new))
            wait_until(lambda: fragile.gauge("cache", "hypic_cache_leases") == 2)
            killed = fragile.kill("cache")
            wait_until(lambda: fragile.pid("cache") not in (0, killed))
            fragile.signal("worker", signal.SIGCONT)
            assert hit.result().served == ["hit"]
            assert hit.result().text == composed
            # Its state could not be published, so nobody may use it but the request that computed it.
            assert cold.result().served == ["cold"]
    finally:
        fragile.signal("worker", signal.SIGCONT)
    fragile.wait_restarted("cache", killed)
    wait_until(lambda: ask(fragile, known).served == ["hit"])
    again = ask(fragile, new)
    assert again.served == ["cold"]
    assert again.text == cold.result().text
    fragile.wait_idle()


def test_a_stream_outlives_the_cache_service(fragile: ServedStack) -> None:
    request = body(fragile, [document("cache streaming")], max_tokens=400)
    with stream(fragile, request) as response:
        expected = read_stream(response.iter_lines()).text
    with stream(fragile, request) as response:
        lines = response.iter_lines()
        begun = read_stream(lines, until_texts=3)
        killed = fragile.kill("cache")
        rest = read_stream(lines)
    assert rest.error is None
    assert rest.finish_reason == "length"
    assert begun.text + rest.text == expected
    fragile.wait_restarted("cache", killed)
    wait_until(lambda: ask(fragile, request["documents"]).served == ["hit"])
    fragile.wait_idle()
