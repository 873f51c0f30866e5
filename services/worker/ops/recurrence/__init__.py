"""The recurrence of a linear layer over packed runs: every family's `state_out = T · state_in + S`.

| family | one token, `S` `[K, V]` | `log_decay` | `beta` |
| --- | --- | --- | --- |
| gated delta rule (arXiv 2412.06464) | `S ← a (I − β k kᵀ) S + β k vᵀ` | `[N, H]` | `[N, H]` |
| Kimi delta (arXiv 2510.26692) | `S ← (I − β k kᵀ) Diag(a) S + β k vᵀ` | `[N, H, K]` | `[N, H]` |
| lightning (arXiv 2401.04658) | `S ← a S + k vᵀ` | `[N, H]` | None |
| diagonal (arXiv 2312.06635) | `S ← Diag(a) S + k vᵀ` | `[N, H, K]` | None |

The output is `o = Sᵀ q`. `scan` runs independent sequences and, where asked, carries their transition: the columns
`[state | transition]` obey the same recurrence with values `[v, 0]`; `capture` lets the transition begin behind a seam.
`walk` carries one state a request over live runs and stored bodies in order. Keys and queries come normalised and scaled;
`log_decay` is the logarithm of `a`, at most 0. How runs compose is design §3.
"""

from services.worker.ops.recurrence.types import CaptureResult, RecurrenceInputs, ScanResult, SlotStates, WalkResult

__all__ = ["CaptureResult", "RecurrenceInputs", "ScanResult", "SlotStates", "WalkResult"]
