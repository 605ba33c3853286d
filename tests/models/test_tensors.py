"""The table of tensors: every row is sound, names of both formats meet in it, fused and split files
fill the same fields.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from martlet.models.families import FAMILIES
from martlet.models.tensors import (
    FUSED,
    ROWS,
    Split,
    canonical_name,
    layer_fields,
    lora_shapes,
    tensor_shapes,
)
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm

NORM = Norm(1e-5)
ATTENTION = Attention(4, 2, 8, 1.0, None, qk_norm=NORM, bias=True)
LAYER = Layer(ATTENTION, DenseFfn(80, Activation.SILU), NORM, NORM)
SPEC = ModelSpec("llama", "", 97, 48, 64, (LAYER,), NORM, False)


@pytest.mark.parametrize("component", ROWS, ids=lambda component: component.__name__)
def test_conditions_are_attributes_of_their_part(component: type) -> None:
    for row in ROWS[component]:
        for attribute in (row.when, row.bias):
            assert attribute is None or hasattr(component, attribute), f"{row.name}: {attribute}"


def test_names_are_unique() -> None:
    rows = [row for component in ROWS.values() for row in component]
    assert len({row.name for row in rows}) == len(rows)
    published = [name for row in rows for name in row.hugging_face]
    published += [name for _, *names in FUSED.values() for name in names]
    assert len(set(published)) == len(published)


def test_ranks_split_what_belongs_to_heads_channels_and_tokens() -> None:
    """Heads, channels and token ids are divided by rows where a matrix makes them, by columns where
    it reads them.
    """
    for row in (row for component in ROWS.values() for row in component):
        divided = [dim in ("Q", "K", "F", "Fe", "Fs", "V") for dim in row.shape]
        expected = {(True, False): Split.ROWS, (False, True): Split.COLUMNS}.get(tuple(divided[-2:]), Split.WHOLE)
        assert row.split is expected, row.name
    assert {row.name for component in ROWS.values() for row in component if row.rotates} == {"attn_q", "attn_k"}


def test_shapes_of_a_split_and_of_a_fused_file() -> None:
    split = tensor_shapes(SPEC, ())
    assert split == {
        "token_embd.weight": (97, 48),
        "output.weight": (97, 48),
        "output_norm.weight": (48,),
        "blk.0.attn_q.weight": (32, 48),
        "blk.0.attn_q.bias": (32,),
        "blk.0.attn_k.weight": (16, 48),
        "blk.0.attn_k.bias": (16,),
        "blk.0.attn_v.weight": (16, 48),
        "blk.0.attn_v.bias": (16,),
        "blk.0.attn_output.weight": (48, 32),
        "blk.0.attn_q_norm.weight": (8,),
        "blk.0.attn_k_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (80, 48),
        "blk.0.ffn_up.weight": (80, 48),
        "blk.0.ffn_down.weight": (48, 80),
        "blk.0.attn_norm.weight": (48,),
        "blk.0.ffn_norm.weight": (48,),
    }
    fused = tensor_shapes(SPEC, {"blk.0.attn_qkv.weight", "blk.0.ffn_up.weight"})
    pieces = {name: shape for name, shape in fused.items() if name not in split or split[name] != shape}
    assert pieces == {
        "blk.0.attn_qkv.weight": (64, 48),
        "blk.0.attn_qkv.bias": (64,),
        "blk.0.ffn_up.weight": (160, 48),
    }
    assert len(fused) == len(split) - 4 - 1
    [stored] = layer_fields(SPEC, LAYER, "blk.0.", {"blk.0.attn_qkv.weight"})[0]["qkv"]
    assert [stored.rows_of(f"attn_{name}") for name in "qkv"] == [slice(0, 32), slice(32, 48), slice(48, 64)]


def test_what_the_spec_lacks_has_no_tensor() -> None:
    bare = replace(LAYER, mixer=replace(ATTENTION, qk_norm=None, bias=False), mixer_norm=None, post_ffn_norm=NORM)
    names = set(tensor_shapes(replace(SPEC, layers=(bare,), tied_embeddings=True), ()))
    assert names == {"token_embd.weight", "output_norm.weight"} | {
        f"blk.0.{name}.weight"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    } | {"blk.0.ffn_norm.weight", "blk.0.post_ffw_norm.weight"}  # fmt: skip
    over_all = replace(LAYER, mixer=replace(ATTENTION, qk_norm_per_head=False))
    shapes = tensor_shapes(replace(SPEC, layers=(over_all,)), ())
    assert (shapes["blk.0.attn_q_norm.weight"], shapes["blk.0.attn_k_norm.weight"]) == ((32,), (16,))


def test_products_that_adapters_update() -> None:
    assert lora_shapes(SPEC, LAYER) == {
        "attn_q": (32, 48),
        "attn_k": (16, 48),
        "attn_v": (16, 48),
        "attn_output": (48, 32),
        "ffn_gate": (80, 48),
        "ffn_up": (80, 48),
        "ffn_down": (48, 80),
    }


@pytest.mark.parametrize(
    ("name", "family", "expected"),
    [
        ("model.embed_tokens.weight", "llama", "token_embd.weight"),
        ("model.language_model.norm.weight", "gemma3", "output_norm.weight"),
        ("lm_head.weight", "llama", "output.weight"),
        ("model.layers.12.self_attn.k_proj.bias", "qwen2", "blk.12.attn_k.bias"),
        ("model.layers.0.mlp.gate_up_proj.weight", "phi3", "blk.0.ffn_up.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "llama", "blk.0.ffn_norm.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "olmo2", "blk.0.post_attention_norm.weight"),
        ("model.layers.0.mlp.chooser.weight", "llama", None),
        ("model.mtp_layers.0.self_attn.q_proj.weight", "mimo", None),
        ("lm_head", "llama", None),
    ],
)
def test_names_of_hugging_face(name: str, family: str, expected: str | None) -> None:
    assert canonical_name(name, FAMILIES[family].renamed) == expected
