"""Every family's logits, from safetensors and from GGUF, against what `transformers` computed
(fault QNT-05 among them).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from steps import Running
from tiny import CASES, IDS, NO_GGUF, golden, write_gguf, write_hf

# of the two longrope cases, one was trained for 32 positions and one for 16: short and long factors
CONTEXT = 32


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal within what float32 sums in another order can differ by, over a few layers."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_from_safetensors(case: str, tmp_path: Path) -> None:
    config, tensors, expected = golden(case)
    assert np.ptp(expected) > 1  # else anything would agree
    close(Running(write_hf(config, tensors, tmp_path / "model"), context=CONTEXT).step(IDS), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case not in NO_GGUF])
def test_logits_from_gguf(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    config, tensors, expected = golden(case)
    close(Running(write_gguf(config, tensors, tmp_path / "model.gguf"), context=CONTEXT).step(IDS), expected)


def test_prompt_in_chunks_of_any_size(tmp_path: Path) -> None:
    config, tensors, expected = golden("gemma3")  # windows, two kinds of layers
    path = write_hf(config, tensors, tmp_path / "model")
    for sizes in ([1] * 30, [7, 1, 13, 9], [29, 1]):
        running, start, rows = Running(path, context=CONTEXT), 0, []
        for size in sizes:
            rows.append(running.step(IDS[start : start + size]))
            start += size
        close(np.concatenate(rows), expected)


def test_only_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    config, tensors, expected = golden("olmo2")
    running = Running(write_hf(config, tensors, tmp_path / "model"), context=CONTEXT)
    assert running.step(IDS[:20], n_logits=0).shape == (0, expected.shape[1])
    close(running.step(IDS[20:], n_logits=2), expected[-2:])


def test_hidden_states_are_what_the_head_reads(tmp_path: Path) -> None:
    config, tensors, expected = golden("llama")
    path = write_hf(config, tensors, tmp_path / "model")
    hidden = Running(path, context=CONTEXT, hidden=True).step(IDS)
    assert hidden.shape == (30, 48)
    close(hidden @ tensors["lm_head.weight"].T, expected)


def llama_by_hand(config: dict, w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Llama with grouped queries in twenty lines of NumPy float64, head by head."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    x = w["model.embed_tokens.weight"][ids].astype(np.float64)
    d, n = config["hidden_size"] // heads, len(ids)
    norm = lambda y, name: y / np.sqrt((y**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]  # noqa: E731
    angle = np.arange(n)[:, None] * config["rope_parameters"]["rope_theta"] ** (-np.arange(0, d, 2) / d)
    turn = np.exp(1j * angle)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        y, out = norm(x, p + "input_layernorm.weight"), []
        q, k, v = (y @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        for head in range(heads):
            g = head // (heads // kv_heads)
            qh, kh, vh = q[:, head * d : head * d + d], k[:, g * d : g * d + d], v[:, g * d : g * d + d]
            qc, kc = ((m[:, : d // 2] + 1j * m[:, d // 2 :]) * turn for m in (qh, kh))
            scores = np.where(np.tri(n, dtype=bool), (qc @ kc.conj().T).real / np.sqrt(d), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ vh)
        x = x + np.concatenate(out, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(x, p + "post_attention_layernorm.weight")
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def test_grouped_llama_in_both_formats_and_by_hand(tmp_path: Path) -> None:
    """Fault QNT-05: the order of q and k rows, 4 heads on 2 KV heads."""
    pytest.importorskip("gguf")
    config, tensors, _ = golden("llama")
    by_hand = llama_by_hand(config, tensors, IDS)
    from_hf = Running(write_hf(config, tensors, tmp_path / "model"), context=CONTEXT).step(IDS)
    from_gguf = Running(write_gguf(config, tensors, tmp_path / "model.gguf"), context=CONTEXT).step(IDS)
    close(from_hf, by_hand)
    close(from_gguf, by_hand)
