"""Engines that the connector does not know are refused at their start, with every reason."""

from dataclasses import replace
from typing import Any

import pytest
from hypic_vllm.gate import SUPPORTED_VERSIONS, EngineFacts, GroupFacts, UnsupportedEngineError, check_engine
from hypic_vllm.options import ConnectorOptions, OptionError

_RECURRENT = GroupFacts("recurrent", 8192, ("bfloat16", "float32"), ((3, 1024), (8, 64, 64)), "none")
_ATTENTION = GroupFacts("attention", 384, ("bfloat16",))
_KNOWN = EngineFacts(
    version=SUPPORTED_VERSIONS[0],
    device="cpu",
    architectures=("Qwen3_5ForCausalLM",),
    model_dtype="bfloat16",
    cache_dtype="auto",
    ranks=1,
    has_speculation=False,
    has_hybrid_manager=True,
    conv_layout="SD",
    key_value_layout="LBHNC",
    kv_role="kv_consumer",
    load_failure_policy="recompute",
    has_second_runner=False,
    groups=(_RECURRENT, _RECURRENT, _ATTENTION),
)


def test_what_is_tested_starts() -> None:
    check_engine(_KNOWN)
    check_engine(replace(_KNOWN, groups=(replace(_RECURRENT, cache_mode="align", block_size=384), _ATTENTION)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.33.0"}, "vLLM 0.33.0 is not tested"),
        ({"device": "cuda"}, "device is cuda"),
        ({"architectures": ("MambaForCausalLM",)}, "the model is MambaForCausalLM"),
        ({"model_dtype": "float16"}, "dtype is float16"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"ranks": 2}, "2 ranks"),
        ({"has_speculation": True}, "speculative"),
        ({"has_hybrid_manager": False}, "disable_hybrid_kv_cache_manager is true; it must be false"),
        ({"conv_layout": "DS"}, "VLLM_SSM_CONV_STATE_LAYOUT"),
        ({"key_value_layout": "LBNHC"}, "LBNHC"),
        ({"kv_role": "kv_both"}, "kv_consumer"),
        ({"load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"has_second_runner": True}, "second model runner"),
        ({"groups": (_ATTENTION,)}, "both recurrent and full-attention"),
    ],
)
def test_every_other_engine_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        check_engine(replace(_KNOWN, **change))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (replace(_ATTENTION, block_size=100), "block size 100"),
        (replace(_ATTENTION, dtypes=("float16",)), "float16"),
        (replace(_RECURRENT, cache_mode="all"), "mamba_cache_mode is all"),
        (replace(_RECURRENT, dtypes=("bfloat16", "bfloat16")), "mamba_ssm_cache_dtype"),
        (replace(_RECURRENT, shapes=((8, 64, 64),)), "shapes"),
        (replace(_RECURRENT, extra_blocks=1), "further blocks"),
        (GroupFacts("SlidingWindowSpec", 384, ()), "SlidingWindowSpec"),
    ],
)
def test_every_other_group_is_refused(group: GroupFacts, reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"group 2: .*{reason}"):
        check_engine(replace(_KNOWN, groups=(_RECURRENT, _ATTENTION, group)))


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(UnsupportedEngineError) as refused:
        check_engine(replace(_KNOWN, version="1.0", ranks=4))
    assert "1.0" in str(refused.value)
    assert "4 ranks" in str(refused.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "workers"),
        ({"workers": []}, "workers"),
        ({"workers": "127.0.0.1:7102"}, "workers"),
        ({"workers": ["a:1"], "second": 3}, "no option 'second'"),
        ({"workers": ["a:1"], "seconds": 0}, "seconds"),
        ({"workers": ["a:1"], "limit_bytes": "much"}, "limit_bytes"),
        ({"workers": ["a:1"], "model_revision": 3}, "model_revision"),
    ],
)
def test_options_are_checked(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        ConnectorOptions.read(config)


def test_options_are_read() -> None:
    options = ConnectorOptions.read({"workers": ["a:1", "b:*"], "seconds": 5})
    assert (options.workers, options.seconds) == (("a:1", "b:*"), 5)
