"""What a served stack tells of itself agrees with what its replies say."""

from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.served import ServedStack, wait_until

SERVED = ("live", "cold", "hit", "prefix")
WORKERS_WORDS = {"live": "live", "cold": "captured", "hit": "segment", "prefix": "prefix"}


def router_tokens(stack: ServedStack) -> dict[str, float]:
    return {name: stack.router_metric("hypic_prompt_tokens_total", f'served="{name}"') for name in SERVED}


def worker_tokens(stack: ServedStack) -> dict[str, float]:
    name = "hypic_worker_prompt_tokens_total"
    return {ours: stack.gauge("workers", name, f'served="{its}"') for ours, its in WORKERS_WORDS.items()}


def grown(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def test_router_worker_and_usage_count_the_same_tokens(stack: ServedStack) -> None:
    """Over a cold request, hits in another order, a changed document, and every mode."""
    stack.wait_idle()
    router, worker = router_tokens(stack), worker_tokens(stack)
    generated = stack.router_metric("hypic_generation_tokens_total")
    names = [document(f"telemetry {number}") for number in range(3)]
    replies = [ask(stack, names), ask(stack, names[::-1]), ask(stack, [*names, document("telemetry new")])]
    replies += [ask(stack, names, reuse=reuse) for reuse in ("exact", "off")]
    replies.append(ask(stack, [document("telemetry live")], cold="live"))
    system = {"role": "system", "content": document("telemetry prefix", 80)["text"]}
    questions = ({"role": "user", "content": text} for text in ("What opens?", "Who closes?"))
    replies += [ask(stack, names, messages=[system, question]) for question in questions]
    for reply in replies:
        reply.check_counts()
    parts = [part for reply in replies for part in reply.raw["hypic"]["parts"]]
    told = {
        "live": sum(part["live_tokens"] for part in parts),
        "cold": sum(part["captured_tokens"] for part in parts),
        "hit": sum(part["reused_tokens"] for part in parts if part["served"] != "prefix"),
        "prefix": sum(part["reused_tokens"] for part in parts if part["served"] == "prefix"),
    }
    assert all(told.values())
    assert grown(router_tokens(stack), router) == told
    assert sum(told.values()) == sum(reply.prompt_tokens for reply in replies)
    wait_until(lambda: grown(worker_tokens(stack), worker) == told)
    completed = sum(reply.raw["usage"]["completion_tokens"] for reply in replies)
    assert stack.router_metric("hypic_generation_tokens_total") - generated == completed
    # What is captured behind a reply must not meet the next test.
    stack.wait_idle()
