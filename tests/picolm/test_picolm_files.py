"""Files that are broken, odd, or unusual: each is read rightly or refused with a message (faults
A15, A16 and B).
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import make_malformed
import numpy as np
import pytest
from recordings import notes, ties_away

import picolm.model
from picolm.cli import main
from picolm.gguf import GGUF
from picolm.model import KVCache, Model, model_forward
from picolm.tokenizer import Tokenizer

CASES = {case["name"]: case for case in notes("malformed")}
EITHER = [
    "head_dim_512",
    "layers_70",
    "head_count_array",
    "context_missing",
    "context_2e30",
    "alignment_56_not_a_power_of_two",
    "scores_missing",
]
EITHER += ["rope_scaling_linear", "unknown_norm_type"]  # type 30 is BF16, which the C does not know
ACCEPTED = [
    name for name, case in CASES.items() if case["should"].startswith("accept") and "reject" not in case["should"]
] + EITHER
REFUSED = [name for name in CASES if name not in ACCEPTED]
SAME_AS_PLAIN = [
    "version_2",
    "context_2e30_c32",
    "vocab_size_key_missing",
    "general_embedding_length",
    "context_2e32_plus_16_as_uint64",
]


def run(folder: Path, name: str) -> tuple[int, bytes]:
    out = io.BytesIO()
    return main([str(folder / f"{name}.gguf"), *CASES[name]["args"]], out), out.getvalue()


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(malformed: Path, name: str) -> None:
    status, out = run(malformed, name)
    assert status == 0
    assert out.endswith(b"\n")
    if name in SAME_AS_PLAIN:
        assert out == run(malformed, "plain")[1]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(malformed: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault B: the C crashes on most of these, and answers nonsense on others."""
    assert run(malformed, name) == (1, b"")
    message = capsys.readouterr().err.splitlines()[-2:]
    assert message[1] == "Failed"
    assert len(message[0]) > 20, message


def test_all_cases_are_here() -> None:
    assert (len(CASES), len(ACCEPTED)) == (73, 21)


def reference(
    m: Model, ids: list[int], eps: float = 1e-5, base: float = 1e4, dims: int = 16, scale: float = 1.0
) -> np.ndarray:
    """The last token's logits in float64, for these one-layer files with two heads and one
    key/value head of 16.
    """

    def w(name: str) -> np.ndarray:
        dims_, _, at = m.file.tensors[name]
        at += m.file.data_start
        return (
            np.frombuffer(m.file.bytes[at : at + 4 * int(np.prod(dims_))].tobytes(), "<f4")
            .reshape(dims_[::-1])
            .astype(np.float64)
        )

    def norm(x: np.ndarray) -> np.ndarray:
        # all norm weights of these files are 1
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

    def turn(x: np.ndarray) -> np.ndarray:
        out = x.copy()
        for position, heads in enumerate(x):
            for h, head in enumerate(heads):
                for i in range(dims // 2):
                    angle = position / scale / base ** (2 * i / dims)
                    a, b = head[2 * i], head[2 * i + 1]
                    out[position, h, 2 * i] = a * np.cos(angle) - b * np.sin(angle)
                    out[position, h, 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    x = w("token_embd.weight")[ids]
    n = norm(x)
    q, k = (turn((n @ w(f"blk.0.attn_{name}.weight").T).reshape(len(ids), -1, 16)) for name in "qk")
    v = n @ w("blk.0.attn_v.weight").T
    heads = []
    for h in range(2):
        e = np.exp(q[-1, h] @ k[:, 0].T / 4)
        heads.append(e / e.sum() @ v)
    x = x[-1] + w("blk.0.attn_output.weight") @ np.concatenate(heads)
    n = norm(x)
    gate = w("blk.0.ffn_gate.weight") @ n
    x = x + w("blk.0.ffn_down.weight") @ (gate / (1 + np.exp(-gate)) * (w("blk.0.ffn_up.weight") @ n))
    return w("output.weight") @ norm(x)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {}),
        ("rms_eps_large", {"eps": 0.5}),
        ("rope_base_float64", {"base": 500000.0}),
        ("rope_dim_half", {"dims": 8}),
        ("rope_scaling_linear", {"scale": 4.0}),
    ],
)
def test_keys_that_the_c_ignores(malformed: Path, name: str, settings: dict[str, float]) -> None:
    """Fault A15: there the logits are the same with and without these keys."""
    m = Model(str(malformed / f"{name}.gguf"))
    ids = [1, 260, 261, 259, 260, 262, 261]
    logits = model_forward(m, KVCache(m.config), ids)
    assert np.abs(logits - reference(m, ids, **settings)).max() < 4e-3  # type: ignore[arg-type]
    if settings:
        assert np.abs(logits - reference(m, ids)).max() > 1e-2


def test_bos_and_space_keys(malformed: Path) -> None:
    """Fault A8."""

    def ids(name: str) -> list[int]:
        return Tokenizer(GGUF(malformed / f"{name}.gguf").meta, 269).encode(b"ab a")

    assert ids("plain")[0] == 1
    assert ids("bos_minus_1") == ids("add_bos_false") == ids("plain")[1:]
    # `ab`, `▁a`; with the prefix there is `▁a`, `b` in front
    assert ids("add_space_prefix_false") == [1, 268, 267]


def test_architectures(malformed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault A16: the C takes whatever it is for a llama."""
    assert run(malformed, "other_architecture")[0] == 1
    assert "qwen2.embedding_length is missing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain", *SAME_AS_PLAIN])
def test_right_files_as_the_c_reads_them(
    malformed: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text, of N + 1 tokens (fault A9), where it was right."""
    monkeypatch.setattr(picolm.model, "fp32_to_fp16", ties_away)
    args = ["4" if a == "3" else a for a in CASES[name]["args"]]
    out = io.BytesIO()
    assert main([str(malformed / f"{name}.gguf"), *args, "--order", "sse"], out) == 0
    recorded = (
        CASES[name] if CASES[name]["ended"] == "exit 0" and CASES[name]["same_stdout_as_plain"] else CASES["plain"]
    )
    assert out.getvalue() == bytes.fromhex(recorded["stdout_hex"])


@pytest.mark.parametrize("name", notes("models")["models"])
def test_settings_of_the_models(tiny: Path, name: str) -> None:
    s = notes("models")["models"][name]
    m = Model(str(tiny / s["file"]))
    c = m.config
    assert (c.n_embd, c.n_ffn, c.n_heads, c.n_kv_heads) == (s["n_embd"], s["n_ffn"], s["n_heads"], s["n_kv"])
    assert (c.n_layers, c.max_seq_len, c.rope_base) == (s["n_layers"], s["ctx"], s["base"])
    assert (m.output is m.token_embd) == s["tied"]


SWAPS: dict[str, Any] = {  # values of every kind, in the place of a key's own
    "u8": (0, 3), "i32": (5, -1), "f32": (6, 1.5), "nan": (6, float("nan")), "bool": (7, 1), "text": (8, "x"), "bytes": (8, b"\xff"),
    "numbers": (9, (4, [1, 2, 3])), "none": (9, (4, [])), "texts": (9, (8, ["a", "b"])), "u64": (10, 2**64 - 1), "f64": (12, 3.0),
}  # fmt: skip
MORE_KEYS = ["add_bos_token", "add_space_prefix", "eot_token_id", "pre", "merges"]


def test_values_of_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault B: every key with a value of every kind: it runs, or a message names the key, what was
    found or what is needed.
    """
    for key in [*make_malformed.G().kv, *(f"tokenizer.ggml.{k}" for k in MORE_KEYS)]:
        for kind, value in SWAPS.items():
            g = make_malformed.G()
            g.kv[key] = value
            (tmp_path / "swapped.gguf").write_bytes(g.build())
            status = main([str(tmp_path / "swapped.gguf"), "-p", "ab a", "-n", "2", "-t", "0", "-j", "1"], io.BytesIO())
            lines = capsys.readouterr().err.splitlines()
            if status == 0:
                continue
            about = " ".join(lines[-3:-1])
            words = [
                key.rsplit(".", 1)[1],
                key.split(".")[1],
                "tensor",
                "context",
                "multiple",
                "length",
                "llama.",
                "vocabulary",
            ]
            assert lines[-1] == "Failed", (key, kind)
            assert any(word in about for word in words), (key, kind, about)
            assert "truth value" not in about, (key, kind)


def test_damaged_files_never_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault B: 400 files with a few bytes of what precedes the weights changed, a number there made
    huge, or the end cut off.
    """
    rng, g = random.Random(5), make_malformed.G()
    whole = g.build()
    for i in range(400):
        data = bytearray(whole)
        at = rng.randrange(g.data_at - 8)
        if i % 3 == 0:
            data[at : at + 8] = rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif i % 3 == 1:
            for _ in range(rng.choice([1, 2, 5])):
                data[rng.randrange(g.data_at)] = rng.randrange(256)
        else:
            del data[rng.randrange(len(data)) :]
        (tmp_path / "damaged.gguf").write_bytes(data)
        status = main([str(tmp_path / "damaged.gguf"), "-p", "ab a", "-n", "1", "-t", "0", "-j", "1"], io.BytesIO())
        lines = capsys.readouterr().err.splitlines()
        assert status == 0 or (lines[-1] == "Failed" and len(lines[-2]) > 20), (i, lines)
