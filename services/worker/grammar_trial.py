"""A process that compiles one grammar and follows it a little, within bounds of its own: some take minutes, or all memory.

`python -m services.worker.grammar_trial CPU_SECONDS BYTES` reads `{"kind", "text"}` and writes, as JSON, why the grammar
cannot be honoured, or an empty string. Where the bounds do not suffice, the process is killed.
"""

import json
import random
import resource
import sys
from contextlib import suppress

__all__ = ["main"]

_NUM_STEPS = 64


def main() -> None:
    """Try the grammar on standard input."""
    cpu_seconds, num_bytes = map(int, sys.argv[1:])
    _bound(resource.RLIMIT_CPU, cpu_seconds)
    _bound(resource.RLIMIT_AS, num_bytes)
    _bound(resource.RLIMIT_CORE, 0)
    asked = json.load(sys.stdin)
    sys.stdout.write(json.dumps(_find_fault(asked["kind"], asked["text"])))


def _find_fault(kind: str, text: str) -> str:
    from llguidance import LLTokenizer

    from services.worker.adapters.grammar_sources import build_matcher

    try:
        # What makes a grammar dear is its lexer, whatever the tokens are.
        matcher = build_matcher(LLTokenizer("byte"), kind, text)
    except Exception as error:
        return str(error) or type(error).__name__
    draw = random.Random(0)
    for _ in range(_NUM_STEPS):
        allowed = [token for token, is_allowed in enumerate(matcher.compute_logit_bias()) if is_allowed]
        if matcher.is_error() or not allowed or matcher.is_stopped():
            break
        matcher.consume_token(draw.choice(allowed))
    return matcher.get_error()


def _bound(what: int, limit: int) -> None:
    # Not every system has every bound.
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    main()
