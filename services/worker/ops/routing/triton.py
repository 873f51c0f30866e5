"""Routing on a GPU: one launch, of one warp a program, so that no reduction over experts leaves the warp.

A row's columns are `BG` groups of `BS` experts, both powers of two: they stand in the experts' order, with columns that are
nobody's behind every group and behind the last. Those are −∞ wherever something is chosen.
"""

import torch
import triton
import triton.language as tl

from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routing.types import RoutingRule, Scoring

__all__ = ["choose"]

_TILE = 512
_MOST_COLUMNS_OF_A_WARP = 1024


@triton.jit
def _score(b_l, SIGMOID: tl.constexpr):
    """Scores of logits `[BR, BC]`; columns that are nobody's are −∞ and score nothing."""
    if SIGMOID:
        b_s = tl.sigmoid(b_l)
    else:
        b_p = tl.exp(b_l - tl.max(b_l, axis=1)[:, None])
        b_s = b_p / tl.sum(b_p, axis=1)[:, None]
    return b_s


@triton.jit
def _close_groups(
    b_o,
    SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by, `[BR, BG * BS]`, with all but the best groups at −∞."""
    o_g, o_s = tl.arange(0, BG), tl.arange(0, BS)
    b_o = tl.reshape(b_o, [BR, BG, BS])
    b_worth, b_best = tl.max(b_o, axis=2, return_indices=True)
    if SIZE > 1:
        b_rest = tl.where(o_s[None, None, :] == b_best[:, :, None], float("-inf"), b_o)
        b_worth += tl.max(b_rest, axis=2)
    b_open = tl.zeros([BR, BG], dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        b_g = tl.argmax(b_worth, axis=1)
        b_open = tl.where(o_g[None, :] == b_g[:, None], 1, b_open)
        b_worth = tl.where(o_g[None, :] == b_g[:, None], float("-inf"), b_worth)
    b_o = tl.where(b_open[:, :, None] > 0, b_o, float("-inf"))
    return tl.reshape(b_o, [BR, BG * BS])


@triton.jit
def _choose_kernel(
    logits, bias, experts, weights, N, stride, scale,
    TOP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BR: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    """The `TOP` best experts of a block of rows, one after another."""
    o_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    o_c, o_k = tl.arange(0, BG * BS), tl.arange(0, BK)
    o_e = o_c // BS * SIZE + o_c % BS
    m_e = (o_c // BS < GROUPS) & (o_c % BS < SIZE)
    # Rows behind the last are the last one's again, and are not stored.
    p_l = logits + tl.minimum(o_r, N - 1)[:, None] * stride + o_e[None, :]
    b_s = _score(tl.load(p_l, mask=m_e[None, :], other=float("-inf")), SIGMOID)
    b_o = b_s
    if CORRECTED:
        b_o += tl.load(bias + o_e, mask=m_e, other=0.0)[None, :]
    # As in a sort NaN is the largest: a poisoned row chooses experts that exist, and its weights are NaN.
    b_o = tl.where(b_o == b_o, b_o, float("inf"))
    b_o = tl.where(m_e[None, :], b_o, float("-inf"))
    if TOP_GROUPS < GROUPS:
        b_o = _close_groups(b_o, SIZE, TOP_GROUPS, BR, BG, BS)
    b_e = tl.zeros([BR, BK], dtype=tl.int32)
    b_w = tl.zeros([BR, BK], dtype=tl.float32)
    for i_k in tl.static_range(TOP):
        b_c = tl.argmax(b_o, axis=1)
        m_c = o_c[None, :] == b_c[:, None]
        b_weight = tl.sum(tl.where(m_c, b_s, 0.0), axis=1)
        b_o = tl.where(m_c, float("-inf"), b_o)
        m_k = o_k[None, :] == i_k
        b_e = tl.where(m_k, (b_c // BS * SIZE + b_c % BS)[:, None], b_e)
        b_w = tl.where(m_k, b_weight[:, None], b_w)
    if RENORMALISED:
        b_w = b_w / (tl.sum(b_w, axis=1)[:, None] + 1e-20)
    p_k = o_r[:, None] * TOP + o_k[None, :]
    m_k = (o_r < N)[:, None] & (o_k < TOP)[None, :]
    tl.store(experts + p_k, b_e, mask=m_k)
    tl.store(weights + p_k, b_w * scale, mask=m_k)


def choose(rule: RoutingRule, logits: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    """As `naive.choose`; rows of logits may stand apart, as those of a slice do.

    Raises:
        ValueError: logits or bias are not fp32 of the rule's experts.
    """
    num_experts = rule.num_experts
    fits = logits.dtype == torch.float32 and logits.shape[1] == num_experts
    if not fits or (bias is not None and (bias.dtype != torch.float32 or bias.shape != (num_experts,))):
        raise ValueError(f"logits and bias must be fp32 and of {num_experts} experts")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, device = len(logits), logits.device
    experts = torch.empty(tokens, rule.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=device)
    groups, group = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(rule.group_size)
    rows = max(1, _TILE // (groups * group))
    _choose_kernel[(triton.cdiv(tokens, rows),)](
        logits, logits if bias is None else bias.contiguous(), experts, weights, tokens, logits.stride(0), rule.scale,
        TOP=rule.top_k, GROUPS=rule.num_groups, SIZE=rule.group_size, TOP_GROUPS=rule.top_groups,
        BR=rows, BG=groups, BS=group, BK=triton.next_power_of_2(rule.top_k),
        SIGMOID=rule.scoring is Scoring.SIGMOID, CORRECTED=bias is not None, RENORMALISED=rule.renormalised,
        num_warps=1 if groups * group <= _MOST_COLUMNS_OF_A_WARP else 4,
    )  # fmt: skip
    return Choice(experts, weights)
