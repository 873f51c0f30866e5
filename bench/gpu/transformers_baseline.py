"""`python -m bench.gpu.transformers_baseline --config DIR --tokens N …`: a full recompute by `transformers`, alone on its device.

Prints one JSON object: seconds by number of tokens, and which implementations ran.
"""

import json
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer


def build(config: Path, device: torch.device) -> Any:  # noqa: ANN401 # transformers ships no types
    """The text model of a config's shape, weights drawn on the device by the library's own initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(config).get_text_config()
    attention = "flash_attention_2" if device.type == "cuda" and find_spec("flash_attn") else "sdpa"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation=attention)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("grouped_mm")
    return model.eval()


def measure(model: Any, tokens: int, rounds: int) -> float:  # noqa: ANN401 # transformers ships no types
    """Median seconds from token ids on the host to the first token id on the host; a first time compiles."""
    times = []
    for number in range(rounds + 1):
        ids = [(number * 7919 + position * 104729) % model.config.vocab_size for position in range(tokens)]
        started = time.perf_counter()
        logits = model(torch.tensor([ids], device=model.device), logits_to_keep=1, use_cache=True).logits
        logits[0, -1].argmax().item()
        times.append(time.perf_counter() - started)
        if not torch.isfinite(logits).all().item():
            raise RuntimeError("logits are not finite: this run measures nothing")
    return median(times[1:])


def _has_public_kernels() -> bool:
    """The library takes them where they can be imported."""
    try:
        import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return False
    return True


def main(
    config: Annotated[Path, typer.Option(help="Directory with the config.json of a true shape.")],
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths.")],
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds behind a first one.")] = 3,
    device: Annotated[str, typer.Option(help="Where it runs.")] = "cuda",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
) -> None:
    """Measure and print."""
    torch.manual_seed(seed)
    with torch.inference_mode():
        model = build(config, torch.device(device))
        seconds = {length: measure(model, length, rounds) for length in tokens}
    kernels = "fla" if _has_public_kernels() else "torch's own recurrence"
    attention = model.config._attn_implementation
    print(json.dumps({"seconds": seconds, "recurrence": kernels, "attention": attention}))


if __name__ == "__main__":
    typer.run(main)
