"""The gated delta rule over packed runs: `S ← a (I − β k kᵀ) S + β k vᵀ`, output `o = Sᵀ q`.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464); the composition of runs is design §3.

`scan` runs independent sequences and, where asked, carries their transition: the columns `[state | transition]` obey the
same recurrence with values `[v, 0]`. `walk` carries one state a request over live runs and stored bodies in order.
Keys and queries come normalised and scaled; `log_decay` is the logarithm of `a`, at most 0.
"""

from services.worker.ops.delta_rule.types import DeltaInputs, ScanResult, WalkResult

__all__ = ["DeltaInputs", "ScanResult", "WalkResult"]
