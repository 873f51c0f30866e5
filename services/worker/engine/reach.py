"""Where renewing a body's tokens pays: what the question attends to, as far as the state ahead of the body reaches."""

from collections.abc import Sequence

import torch

from services.worker.engine.combine_plan import CombinePlan

__all__ = ["body_reach", "renewal_scores"]


def body_reach(decays: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """How much of the state at a body's head is left at each of its `num_tokens` tokens, the mean of all heads; fp32.

    decays: of every linear layer, the product over the body `[H]`, which is taken to be even over its tokens, as where
    refreshed blocks start (`refreshed_rows.fade`). 1 everywhere without linear layers. A stored token can only lack what
    precedes its segment as far as that would have reached it.
    """
    if not decays:
        return torch.ones(num_tokens)
    products = torch.cat([own.float() for own in decays])
    before = torch.arange(num_tokens, dtype=torch.float32, device=products.device) / num_tokens
    return products.pow(before[:, None]).mean(1)


def renewal_scores(plan: CombinePlan, attention: torch.Tensor) -> torch.Tensor:
    """How much renewal of every token of a prompt is wanted `[positions]`.

    attention: of the question, over the same positions; tokens outside stored bodies keep theirs.
    """
    scores = attention.clone()
    first = plan.prefix_tokens
    for part in plan.parts:
        if part.state is not None:
            body = slice(first + part.body.start, first + part.body.stop)
            reach = body_reach([plane.decay for plane in part.state.planes], len(part.body))
            scores[body] *= reach.to(scores.device)
        first += len(part.token_ids)
    return scores
