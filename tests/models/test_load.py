"""Loading refuses what it would get wrong, naming the tensor or the key, before anything is
packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steps import Running
from tiny import golden, write_gguf, write_hf

from martlet.config import resolve_config
from martlet.engine.build import plan_for
from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.families import FAMILIES, spec_of
from martlet.models.weights import load_model, outlier_key_layers
from martlet.ops.null import NullBackend

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


class Untouched(NullBackend):
    """Fails if anything is packed."""

    def pack(self, tensors: Any) -> Any:
        raise AssertionError("packed before all was checked")


def load(tmp_path: Path, change: Change, case: str = "llama") -> None:
    config, tensors, _ = golden(case)
    change(config, tensors)
    load_model(open_checkpoint(write_hf(config, tensors, tmp_path / "model")), Untouched())


LAST_DOWN = "model.layers.2.mlp.down_proj.weight"


def test_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"blk\.2\.ffn_down\.weight is missing"):
        load(tmp_path, lambda config, tensors: tensors.__delitem__(LAST_DOWN))


def test_shape(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"blk\.2\.ffn_down\.weight has the shape 48x79, expected 48x80"):
        load(tmp_path, lambda config, tensors: tensors.update({LAST_DOWN: np.zeros((48, 79), np.float32)}))


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.mlp.down_proj.weight", "model.layers.0.mlp.chooser.weight", "score.weight"],
)
def test_extra_tensor(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"holds the tensor .*(blk\.3\.ffn_down|chooser|score)"):
        load(tmp_path, lambda config, tensors: tensors.update({name: np.zeros((48, 80), np.float32)}))


def test_bias_that_the_config_does_not_mention(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.q_proj.bias": np.zeros(48, np.float32)}
    with pytest.raises(FormatError, match=r"blk\.1\.attn_q\.bias"):
        load(tmp_path, lambda config, tensors: tensors.update(extra))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "awq"}),
        ("mlp_bias", True),
        ("hidden_act", "relu"),
        ("num_local_experts", 8),
        ("clip_qkv", 8.0),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 0.7}),
    ],
)
def test_unsupported_settings_are_named(key: str, value: Any, tmp_path: Path) -> None:
    named = key if key != "rope_parameters" else "dynamic|mscale"
    with pytest.raises(UnsupportedError, match=named):
        load(tmp_path, lambda config, tensors: config.update({key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "48"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 1 << 20),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", 1),
        ("rms_norm_eps", -1.0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "big"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_hostile_config(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        load(tmp_path, lambda config, tensors: config.update({key: value}))


def test_unknown_family_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'lama' is not known\. Did you mean 'llama'\?") as error:
        load(tmp_path, lambda config, tensors: config.update({"model_type": "lama"}))
    assert set(error.value.supported) == set(FAMILIES)


def rewritten(tmp_path: Path, case: str, key: str, value: int | float) -> Path:
    """A GGUF file of the case with one more key."""
    gguf = pytest.importorskip("gguf")
    config, tensors, _ = golden(case)
    path = write_gguf(config, tensors, tmp_path / "plain.gguf")
    reader, out = gguf.GGUFReader(path), tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(out, case)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", key):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_key_value(
        key, value, gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
    )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    "key", ["llama.expert_group_count", "llama.attention.clamp_kqv", "llama.attention.temperature_scale"]
)
def test_unread_gguf_keys_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=key):
        spec_of(open_checkpoint(rewritten(tmp_path, "llama", key, 8)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("llama.block_count", 1 << 23), ("llama.rope.dimension_count", 14), ("llama.rope.freq_base", float("nan"))],
)
def test_hostile_gguf_keys(key: str, value: int | float, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        spec_of(open_checkpoint(rewritten(tmp_path, "llama", key, value)))


def test_gguf_window_pattern(tmp_path: Path) -> None:
    path = rewritten(tmp_path, "gemma3", "gemma3.attention.sliding_window_pattern", 2)
    windows = [layer.mixer.window for layer in spec_of(open_checkpoint(path)).layers]
    assert windows == [6, None, 6, None, 6, None, 6]


def test_older_spellings_of_the_config(tmp_path: Path) -> None:
    """rope_theta, rope_scaling, rope_local_base_freq and sliding_window_pattern: the same spec as
    today's.
    """
    config, tensors, _ = golden("gemma3")
    today = spec_of(open_checkpoint(write_hf(config, tensors, tmp_path / "model")))
    del config["rope_parameters"], config["layer_types"], config["_sliding_window_pattern"]
    config |= {
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert spec_of(open_checkpoint(tmp_path / "model")) == today


def test_qwen2_window_only_with_its_switch(tmp_path: Path) -> None:
    config, tensors, _ = golden("qwen2-window")
    for key in ("layer_types", "use_sliding_window"):
        del config[key]
    without = spec_of(open_checkpoint(write_hf(config, tensors, tmp_path / "without")))
    assert [layer.mixer.window for layer in without.layers] == [None, None, None]
    config["use_sliding_window"] = True
    switched = spec_of(open_checkpoint(write_hf(config, tensors, tmp_path / "switched")))
    assert [layer.mixer.window for layer in switched.layers] == [None, 5, 5]


def test_fused_llama_projections_in_gguf(tmp_path: Path) -> None:
    """One attn_qkv matrix whose q and k rows are interleaved, whose v rows are not."""
    pytest.importorskip("gguf")
    config, tensors, expected = golden("llama")
    split = Running(write_gguf(config, tensors, tmp_path / "split.gguf"))
    checkpoint = split.checkpoint
    fused = dict(checkpoint.tensors)
    for i in range(3):
        pieces = [fused.pop(f"blk.{i}.attn_{name}.weight") for name in "qkv"]
        data = np.concatenate([piece.data for piece in pieces])
        shape = (sum(piece.shape[0] for piece in pieces), 48)
        fused[f"blk.{i}.attn_qkv.weight"] = type(pieces[0])(f"blk.{i}.attn_qkv.weight", shape, pieces[0].type, data)
    from tiny import IDS

    split.checkpoint.tensors = fused
    split.model = load_model(split.checkpoint, split.ops)
    np.testing.assert_allclose(split.step(IDS), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    config, tensors, _ = golden("phi3")
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(write_hf(config, tensors, tmp_path / "model"))
    load_model(checkpoint, NullBackend(), progress=lambda done, total: seen.append((done, total)))
    matrices = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (matrices, matrices)


@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_layers_whose_keys_are_too_uneven_for_8_bits(form: str, tmp_path: Path) -> None:
    """One channel of 128 among the key's biases of layer 1; as large a one among the query's is of
    no account.
    """
    config, tensors, _ = golden("qwen2")
    tensors = {name: values.copy() for name, values in tensors.items()}
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = -128.0
    tensors["model.layers.2.self_attn.q_proj.bias"][3] = 500.0
    write = write_gguf if form == "gguf" else write_hf
    with open_checkpoint(write(config, tensors, tmp_path / ("m.gguf" if form == "gguf" else "m"))) as checkpoint:
        spec = spec_of(checkpoint)
        assert outlier_key_layers(checkpoint, spec, 127.0) == (1,)
        assert outlier_key_layers(checkpoint, spec, 128.0) == ()
        plan = plan_for(checkpoint, resolve_config({"model": "m", "kv_dtype": "q8", "backend": "null"}))
        assert plan.kv_dtype == "q8,f16:1"
        q8 = plan_for(checkpoint, resolve_config({"model": "m", "kv_dtype": "q8,q8:1", "backend": "null"}))
        # two heads of 12 channels, values filled to 16: 2 (24 + 32) in f16, 2 (14 + 18) in q8
        assert plan.kv_per_token - q8.kv_per_token == 112 - 64
