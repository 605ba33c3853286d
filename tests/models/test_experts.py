"""Files of mixtures of experts: what is wrong in them is named, before anything is packed; adapters
and speed estimates know what a token reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import write_peft
from steps import Running
from test_load import Untouched, load
from tiny import IDS, golden, write_hf

from martlet import LLM, toy
from martlet.errors import FormatError, MartletError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.families import spec_of
from martlet.models.weights import layer_matrices, load_model
from martlet.ops.null import NullBackend
from martlet.spec import MoeFfn, Scoring

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # OCP MX 1.0


def toy_spec(path: Path, **settings: Any) -> Any:
    return spec_of(open_checkpoint(toy.write_model(path / "toy.gguf", "qwen3moe", settings=settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_used_count": 7}, "7 of 6 experts"),
        ({"expert_used_count": 0}, "expert_used_count is 0"),
        ({"expert_count": -1}, "expert_count is -1"),
        ({"expert_count": "six"}, "expert_count is 'six'"),
        ({"expert_feed_forward_length": -8}, "expert_feed_forward_length is -8"),
        ({"expert_group_count": 4}, "1 of 4 groups of 6 experts"),
        ({"expert_group_count": 3, "expert_used_count": 3}, "3 of 6 experts"),
        ({"expert_group_count": 3, "expert_group_used_count": 4}, "4 of 3 groups"),
        ({"leading_dense_block_count": -1}, "leading_dense_block_count is -1"),
        ({"expert_weights_scale": float("nan")}, "expert_weights_scale is nan"),
    ],
)
def test_hostile_gguf_keys(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = toy.write_model(tmp_path / "toy.gguf", "qwen3moe")
    checkpoint = open_checkpoint(path)
    checkpoint.metadata = {**checkpoint.metadata, **{f"qwen3moe.{key}": value for key, value in settings.items()}}
    with pytest.raises(FormatError, match=message):
        load_model(checkpoint, Untouched())


def test_what_a_gguf_may_ask_for(tmp_path: Path) -> None:
    spec = toy_spec(tmp_path, expert_gating_func=2, expert_weights_scale=2.5, expert_weights_norm=False)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoeFfn)
    assert (ffn.routing.scoring, ffn.routing.scale, ffn.routing.normalised) == (Scoring.SIGMOID, 2.5, False)
    with pytest.raises(UnsupportedError, match=r"expert_gating_func = 9"):
        toy_spec(tmp_path, expert_gating_func=9)
    spec = toy_spec(tmp_path, expert_group_count=3, expert_group_used_count=2)
    assert (spec.layers[0].ffn.routing.n_groups, spec.layers[0].ffn.routing.n_groups_chosen) == (3, 2)


def test_experts_in_a_dense_family_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(toy.write_model(tmp_path / "toy.gguf", "gemma2"))
    checkpoint.metadata = {**checkpoint.metadata, "gemma2.expert_count": 4}
    with pytest.raises(UnsupportedError, match="expert_count"):
        spec_of(checkpoint)
    config, tensors, _ = golden("llama")
    path = write_hf({**config, "num_local_experts": 4}, tensors, tmp_path / "model")
    with pytest.raises(UnsupportedError, match="num_local_experts = 4"):
        spec_of(open_checkpoint(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_local_experts", "6"),
        ("num_local_experts", 1 << 20),
        ("num_experts_per_tok", 7),
        ("moe_intermediate_size", None),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", "all"),
        ("norm_topk_prob", 1),
        ("n_group", 4),
        ("first_k_dense_replace", -1),
        ("routed_scaling_factor", 0),
    ],
)
def test_hostile_config(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        load(tmp_path, lambda config, tensors: config.update({key: value}), "qwen3moe")


def test_an_expert_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up_exps\.4\.weight is missing"):
        load(tmp_path / "1", lambda config, tensors: tensors.pop(name), "qwen3moe")
    with pytest.raises(FormatError, match=r"blk\.1\.ffn_up_exps\.4\.weight has the shape 32x47, expected 32x48"):
        load(tmp_path / "2", lambda config, tensors: tensors.update({name: np.zeros((32, 47), np.float32)}), "qwen3moe")
    more = name.replace("experts.4", "experts.6")
    with pytest.raises(FormatError, match=r"holds the tensor blk\.1\.ffn_up_exps\.6\.weight"):
        load(tmp_path / "3", lambda config, tensors: tensors.update({more: tensors[name]}), "qwen3moe")


def test_a_token_reads_its_experts_only(tmp_path: Path) -> None:
    """Two of six experts; the embedding of a tied model counts as the head that it is."""
    checkpoint = open_checkpoint(toy.write_model(tmp_path / "toy.gguf", "qwen3moe", quantised=False))
    ops = NullBackend(lambda tensors: sum(tensor.data.nbytes for tensor in tensors))
    model = load_model(checkpoint, ops, advise=False)
    experts = sum(t.data.nbytes for name, t in checkpoint.tensors.items() if "_exps" in name)
    vectors = sum(t.data.nbytes for t in checkpoint.tensors.values() if len(t.shape) == 1)
    everything = sum(t.data.nbytes for t in checkpoint.tensors.values()) - vectors
    assert (model.weight_bytes, model.token_bytes) == (everything, everything - experts * 4 // 6)
    matrices = layer_matrices(checkpoint, model.spec)
    assert len(matrices) == 3 * (4 + 1 + 3 * 6)
    assert sum(share for _, share in matrices) == pytest.approx(3 * (4 + 1 + 3 * 2))


def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    path, zeros = toy.write_model(tmp_path / "toy.gguf", "qwen3moe"), np.zeros((4, 64), np.float32)
    adapter = write_peft(tmp_path / "adapter", {"blk.0.ffn_gate": (zeros, np.zeros((32, 4), np.float32))})
    with (
        pytest.raises(MartletError, match=r"ffn_gate, which is no product of a layer"),
        LLM(str(path), lora={"a": str(adapter)}),
    ):
        pass


def test_mxfp4_in_safetensors_is_the_model_of_its_decoded_weights(tmp_path: Path) -> None:
    """gpt-oss as published, against the same numbers in float32."""
    config, _, _ = golden("gpt-oss")
    config |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config["layer_types"] = config["layer_types"][:2]
    rng, c, f, e = np.random.default_rng(8), 64, 32, 6
    shapes = {"embed_tokens.weight": (97, c), "norm.weight": (c,)}
    for layer in ("layers.0.", "layers.1."):
        q, kv = 4 * 16, 2 * 16
        for name, rows, columns in (("q", q, c), ("k", kv, c), ("v", kv, c), ("o", c, q)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, columns)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"{layer}self_attn.sinks": (4,), f"{layer}input_layernorm.weight": (c,)}
        shapes |= {f"{layer}post_attention_layernorm.weight": (c,), f"{layer}mlp.router.weight": (e, c)}
        shapes |= {f"{layer}mlp.router.bias": (e,), f"{layer}mlp.experts.gate_up_proj_bias": (e, 2 * f)}
        shapes[f"{layer}mlp.experts.down_proj_bias"] = (e, c)
    common = {f"model.{name}": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    common["lm_head.weight"] = rng.normal(0, 0.3, (97, c)).astype(np.float32)
    packed, floats = dict(common), dict(common)
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, n, k in (("gate_up_proj", 2 * f, c), ("down_proj", c, f)):
            codes = rng.integers(0, 16, (e, n, k))
            exponents = rng.integers(120, 126, (e, n, k // 32))
            base = f"{layer}mlp.experts.{name}"
            halves = codes.reshape(e, n, k // 32, 16, 2)
            packed[f"{base}_blocks"] = (halves[..., 0] | halves[..., 1] << 4).astype(np.uint8)
            packed[f"{base}_scales"] = exponents.astype(np.uint8)
            values = np.array(E2M1, np.float32)[codes] * np.repeat(2.0 ** (exponents - 127), 32, axis=2)
            floats[base] = np.ascontiguousarray(values.swapaxes(1, 2), np.float32)
    quantised = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    one = Running(write_hf(quantised, packed, tmp_path / "packed")).step(IDS)
    other = Running(write_hf(config, floats, tmp_path / "floats")).step(IDS)
    assert np.ptp(one) > 1
    assert np.array_equal(one, other)


def test_settings_of_gpt_oss_that_are_not_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"swiglu_limit = 5\.0"):
        load(tmp_path, lambda config, tensors: config.update(swiglu_limit=5.0), "gpt-oss")


def test_groups_need_as_many_experts_as_rank_them(tmp_path: Path) -> None:
    """GLM-4.5 ranks a group by its two best experts."""
    with pytest.raises(FormatError, match="6 groups of 6 experts"):
        load(tmp_path, lambda config, tensors: config.update(n_group=6, topk_group=3), "glm4moe")
