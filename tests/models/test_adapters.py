"""Adapters: what they add is what a model with merged weights has, PEFT agrees, and odd files are
refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import HF_NAMES, random_updates, write_gguf_adapter, write_peft
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tiny import IDS, golden, interleave, write_gguf, write_hf

from martlet.errors import FormatError, MartletError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import forward
from martlet.models.families import spec_of
from martlet.models.lora import read_adapter, with_adapters
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from martlet.spec import ModelSpec

F32 = NDArray[np.float32]


def logits(model: Path, adapter: Path | None, ids: Sequence[int] = IDS) -> F32:
    """Logits of every position, in one step of the reference backend."""
    ops = ReferenceBackend()
    loaded = load_model(open_checkpoint(model), ops, context=32)
    adapted, tables = with_adapters(ops, loaded, 4)
    if adapter is not None:
        for name, (a, b) in read_adapter(adapter, loaded.spec).updates.items():
            ops.set_lora(tables[name], 2, a, b)
    caches = [ops.kv_cache(1, 32, x.mixer.n_kv_heads, x.mixer.head_dim, "f32") for x in loaded.spec.layers]
    n = len(ids)
    positions = np.arange(n, dtype=np.int32)
    starts, table = np.array([0, n], np.int32), np.zeros((1, 1), np.int32)
    slots = np.full(n, 2 if adapter is not None else -1, np.int32)
    step = StepInputs(np.array(ids, np.int32), positions, positions, starts, table, positions, lora_slots=slots)
    return ops.download(ops.capture(lambda: forward(ops, adapted, caches), StepLimits(n, 1, n, 1)).run(step))


def spec_at(folder: Path) -> ModelSpec:
    return spec_of(open_checkpoint(folder), 32)


def merged(tensors: dict[str, F32], updates: dict[str, tuple[F32, F32]], scale: float) -> dict[str, F32]:
    """The checkpoint with every update in its weights."""
    weights = dict(tensors)
    for name, (a, b) in updates.items():
        _, layer, product = name.split(".")
        key = f"model.layers.{layer}.{HF_NAMES[product]}.weight"
        weights[key] = (tensors[key].astype(np.float64) + scale * b.astype(np.float64) @ a).astype(np.float32)
    return weights


def close(actual: F32, expected: F32) -> bool:
    return bool(np.abs(actual - expected).max() <= 2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma2", "granite", "olmo2"])
def test_an_adapter_is_as_if_merged(case: str, tmp_path: Path) -> None:
    """Norms after a sublayer, scaled residuals and biases included."""
    config, tensors, plain = golden(case)
    base = write_hf(config, tensors, tmp_path / "base")
    updates = random_updates(spec_at(base), 4, seed=3)
    adapter = write_peft(tmp_path / "adapter", updates, alpha=8)
    expected = logits(write_hf(config, merged(tensors, updates, 2.0), tmp_path / "merged"), None)
    actual = logits(base, adapter)
    assert close(actual, expected)
    assert not close(actual, plain)
    assert np.array_equal(logits(base, None), logits(base, None))
    assert close(logits(base, None), plain)


def test_gguf_adapters_have_their_rows_in_the_files_order(tmp_path: Path) -> None:
    """A GGUF file's q and k rows are those of neighbouring pairs; on both kinds of model the
    adapter is the same one.
    """
    config, tensors, _ = golden("llama")
    base = write_hf(config, tensors, tmp_path / "base")
    file = write_gguf(config, tensors, tmp_path / "base.gguf")
    updates = random_updates(spec_at(base), 4, seed=5)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    turned = {
        name: (a, interleave(b, heads[product]) if (product := name.split(".")[2]) in heads else b)
        for name, (a, b) in updates.items()
    }
    peft = write_peft(tmp_path / "adapter", updates, alpha=8)
    gguf = write_gguf_adapter(tmp_path / "adapter.gguf", turned, alpha=8)
    assert read_adapter(peft, spec_at(base)).digest == read_adapter(gguf, spec_at(base)).digest
    expected = logits(base, peft)
    for model in (base, file):
        for adapter in (peft, gguf):
            assert close(logits(model, adapter), expected)


def test_scales(tmp_path: Path) -> None:
    """alpha ÷ rank, alpha ÷ √rank, and a module's own alpha."""
    base = write_hf(*golden("llama")[:2], tmp_path / "base")
    spec = spec_at(base)
    updates = random_updates(spec, 4, seed=1, products=("attn_q", "ffn_down"))

    def b_of(name: str, **settings: Any) -> F32:
        return read_adapter(write_peft(tmp_path / "adapter", updates, **settings), spec).updates[name][1]

    b = updates["blk.0.attn_q"][1]
    assert np.allclose(b_of("blk.0.attn_q", alpha=8), 2 * b)
    assert np.allclose(b_of("blk.0.attn_q", alpha=8, use_rslora=True), 4 * b)
    pattern = {"layers.0.self_attn.q_proj": 2, "down_proj": 12}
    assert np.allclose(b_of("blk.0.attn_q", alpha=8, alpha_pattern=pattern), 0.5 * b)
    assert np.allclose(b_of("blk.1.attn_q", alpha=8, alpha_pattern=pattern), 2 * updates["blk.1.attn_q"][1])
    assert np.allclose(b_of("blk.1.ffn_down", alpha=8, alpha_pattern=pattern), 3 * updates["blk.1.ffn_down"][1])


def test_fused_products(tmp_path: Path) -> None:
    """Phi-3's qkv_proj and gate_up_proj: one A, and a B of which each product gets its rows."""
    base = write_hf(*golden("phi3")[:2], tmp_path / "base")
    spec = spec_at(base)
    a, mixer, f = spec.layers[0], spec.layers[0].mixer, spec.layers[0].ffn.ffn_hidden
    sizes = [mixer.n_heads * mixer.head_dim, *[mixer.n_kv_heads * mixer.head_dim] * 2]
    rng = np.random.default_rng(0)
    low = rng.standard_normal((2, spec.hidden)).astype(np.float32)
    high, both = (rng.standard_normal((n, 2)).astype(np.float32) for n in (sum(sizes), 2 * f))
    prefix = "base_model.model.model.layers.1."
    save_file(
        {
            f"{prefix}self_attn.qkv_proj.lora_A.weight": low,
            f"{prefix}self_attn.qkv_proj.lora_B.weight": high,
            f"{prefix}mlp.gate_up_proj.lora_A.weight": low,
            f"{prefix}mlp.gate_up_proj.lora_B.weight": both,
        },
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    updates = read_adapter(tmp_path, spec).updates
    assert np.array_equal(updates["blk.1.attn_k"][1], high[sizes[0] : sizes[0] + sizes[1]])
    assert np.array_equal(updates["blk.1.ffn_gate"][1], both[:f])
    assert np.array_equal(updates["blk.1.ffn_up"][1], both[f:])
    assert all(np.array_equal(low, pair[0]) for pair in updates.values())
    assert len(updates) == 5
    assert a.ffn.ffn_hidden == f


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return spec_at(write_hf(*golden("llama")[:2], tmp_path_factory.mktemp("llama") / "base"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"alpha_pattern": {".*q_proj": 3}}, "alpha_pattern"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha is '1000"),
        ({"lora_alpha": 1e300}, "expected a number below 1e\\+30"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"r": 8}, r"adapter_model.safetensors: .*lora_[AB].weight has the rank 4, .* r = 8"),
        (
            {"rank_pattern": {"layers.1.mlp.down_proj": 2}},
            r"layers.1.mlp.down_proj.lora_[AB].weight has the rank 4, .* r = 2",
        ),
        ({"rank_pattern": {".*q_proj": 4}}, "rank_pattern"),
    ],
)
def test_settings_that_mean_something_else(
    settings: dict[str, Any], expected: str, tmp_path: Path, llama: ModelSpec
) -> None:
    write_peft(tmp_path, random_updates(llama, 4, 1), **settings)
    with pytest.raises(MartletError, match=expected):
        read_adapter(tmp_path, llama)


def test_files_that_do_not_fit(tmp_path: Path, llama: ModelSpec) -> None:
    good = random_updates(llama, 4, 1)
    write_peft(tmp_path, good)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    large = np.zeros((600, llama.hidden), np.float32)
    for changed, error, expected in (
        ({f"{q}B.weight": None}, FormatError, "only one of its two"),
        ({f"{q}A.weight": tensors[f"{q}A.weight"][:, :-1].copy()}, FormatError, "blk.0.attn_q has A"),
        ({f"{q}A.weight": np.full_like(tensors[f"{q}A.weight"], np.nan)}, FormatError, "not finite"),
        ({f"{q}A.weight": large, f"{q}B.weight": np.zeros((llama.hidden, 600), np.float32)}, UnsupportedError, "rank 600"),
        ({"base_model.model.lm_head.lora_A.weight": large}, UnsupportedError, "lm_head"),
        ({f"{q}magnitude_vector": large}, UnsupportedError, "magnitude"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": large[:4].copy(),
          "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": large[:, :4].copy()}, UnsupportedError, "blk.9.ffn_up"),
    ):  # fmt: skip
        kept = {name: value for name, value in {**tensors, **changed}.items() if value is not None}
        save_file(kept, tmp_path / "adapter_model.safetensors")
        with pytest.raises(error, match=expected):
            read_adapter(tmp_path, llama)
    for path in (tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(FormatError):
            read_adapter(path, llama)
    write_gguf(*golden("llama")[:2], tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"general\.type"):
        read_adapter(tmp_path / "model.gguf", llama)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3", "gemma3", "phi3", "granite", "smollm3", "olmo2"])
def test_peft_agrees(case: str, tmp_path: Path) -> None:
    """PEFT's own folder, and its logits, on every family's tiny model."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    from make_golden_models import transformers_model

    model, _, _ = transformers_model(case)
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(4)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted(torch.tensor([list(IDS)])).logits[0].numpy()
    actual = logits(tmp_path / "base", tmp_path / "adapter")
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()
    assert not close(actual, golden(case)[2])
