"""Files that are broken, odd, or unusual: each is read rightly or refused with a message (faults A15, A16 and B)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from recordings import notes

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
    """The last token's logits in float64, for these one-layer files with two heads and one key/value head of 16."""

    def w(name: str) -> np.ndarray:
        dims_, _, at = m.file.tensors[name]
        at += m.file.data_start
        return (
            np.frombuffer(m.file.bytes[at : at + 4 * int(np.prod(dims_))].tobytes(), "<f4")
            .reshape(dims_[::-1])
            .astype(np.float64)
        )

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)  # all norm weights of these files are 1

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
    assert ids("add_space_prefix_false") == [1, 268, 267]  # `ab`, `▁a`; with the prefix there is `▁a`, `b` in front


def test_architectures(malformed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault A16: the C takes whatever it is for a llama."""
    assert run(malformed, "other_architecture")[0] == 1
    assert "qwen2.embedding_length is missing" in capsys.readouterr().err
