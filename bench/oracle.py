"""A full recompute by `transformers`, so that a slow `off` of ours could not pass for a fast cache."""

import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

__all__ = ["measure_transformers"]

_ROUNDS = 3


def measure_transformers(checkpoint: Path, num_tokens: int) -> float:
    """Median seconds of one fp32 forward over a prompt, with logits of its last token, after one warm-up."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    token_ids = (torch.arange(num_tokens) * 104729 % (model.config.vocab_size - 32) + 16)[None]
    times = []
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):
            started = time.perf_counter()
            model(token_ids, logits_to_keep=1)
            times.append(time.perf_counter() - started)
    return median(times[1:])
