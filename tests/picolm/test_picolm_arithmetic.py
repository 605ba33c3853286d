"""The C's recorded arithmetic, bit for bit: functions, blocks, operations, whole forward passes,
the sampler.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import BUILDS, MISREAD, REFUSED, RUNNABLE, arrays, notes, same_bits, ties_away, to_ggml

import picolm.model
from picolm import sampler
from picolm.gguf import Weight
from picolm.libm import cosf, expf, powf, sinf
from picolm.model import KVCache, Model, model_forward, rope_tables
from picolm.quant import BLOCKS, Order, dequantize_row, fp16_to_fp32, fp32_to_fp16, row_bytes, vec_dot
from picolm.tensor import Team, matmul, rmsnorm, rope, silu, softmax

NUMBER = {block.name: number for number, block in BLOCKS.items()}
ORDERS: list[Order] = ["sse", "scalar"]


@pytest.fixture
def c_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values rounded as the C rounds them, whose ties go away from zero (fault A20)."""
    monkeypatch.setattr(picolm.model, "fp32_to_fp16", ties_away)


def test_the_c_librarys_functions() -> None:
    z = arrays("scalar_math")
    assert same_bits(expf(z["expf_x"]), z["expf"])
    assert same_bits(sinf(z["trig_x"]), z["sinf"])
    assert same_bits(cosf(z["trig_x"]), z["cosf"])
    got = np.array([powf(float(x), y[None])[0] for x, y in zip(z["powf_x"], z["powf_y"], strict=True)])
    assert same_bits(got, z["powf"])


def test_half_floats_round_to_even() -> None:
    """Fault A20: the C rounds ties away from zero, against its own comment."""
    z = arrays("scalar_math")
    x = z["fp32_bits"].view(np.float32)
    assert same_bits(fp32_to_fp16(x), z["to_fp16_nearest_even"].view(np.float16))
    assert (z["to_fp16"] != z["to_fp16_nearest_even"])[~np.isnan(x)].sum() == 417
    # so the tests' own copy of the fault is the C's
    assert same_bits(ties_away(x), z["to_fp16"].view(np.float16))
    all_halves = fp16_to_fp32(np.arange(65536, dtype=np.uint16).view(np.float16))
    assert hashlib.sha256(all_halves.tobytes()).digest() == bytes(z["from_fp16_all_sha256"])


ROWS = [name.removesuffix("/rows") for name in arrays("quant").files if name.endswith("/rows")]


@pytest.mark.parametrize("case", [case for case in ROWS if "picolm_order" not in case])
def test_rows_of_blocks(case: str) -> None:
    """Fault A3: Q2_K and Q3_K are read as ggml lays them out; all other rows are as the C reads
    them.
    """
    z, type_ = arrays("quant"), NUMBER[case.split("/")[0]]
    right = z.get(f"{case}/spec_dequant", z.get(f"{case}/dequant"))
    if right is not None:
        assert same_bits(dequantize_row(z[f"{case}/rows"], type_), right)
    if f"{case}/spec_dequant" in z:
        # what the C makes of it is something else
        assert not same_bits(right, z[f"{case}/dequant"])
        return
    for order in ORDERS:
        recorded = z.get(f"{case}/vec_dot", z.get(f"{case}/vec_dot_{BUILDS[order]}"))
        assert same_bits(vec_dot(z[f"{case}/rows"], z[f"{case}/x"], type_, order), recorded)


@pytest.mark.parametrize("type_", ["Q4_1", "Q5_0", "Q5_1", "Q5_K", "BF16"])
def test_rows_of_types_that_the_c_stops_on(type_: str) -> None:
    """Fault A4."""
    z = arrays("spec")
    assert same_bits(dequantize_row(z[f"rows/{type_}/rows"], NUMBER[type_]), z[f"rows/{type_}/dequant"])


@pytest.mark.parametrize(
    "case", ["Q2_K/real", "Q2_K/bits", "Q3_K/real", "Q3_K/real_picolm_order", "Q3_K/bits_picolm_order"]
)
def test_arithmetic_of_misread_types(case: str) -> None:
    """With their bits put where the C looks for them, Q2_K and Q3_K come out of both alike."""
    z, type_ = arrays("quant"), case.split("/")[0]
    rows = to_ggml(z[f"{case}/rows"], type_)
    assert same_bits(dequantize_row(rows, NUMBER[type_]), z[f"{case}/dequant"])
    for order in ORDERS:
        assert same_bits(vec_dot(rows, z[f"{case}/x"], NUMBER[type_], order), z[f"{case}/vec_dot_{BUILDS[order]}"])


def test_a_row_that_does_not_fill_its_blocks() -> None:
    """Fault B: the C cuts it without notice."""
    with pytest.raises(ValueError, match="20 weights does not fill Q8_0"):
        row_bytes(NUMBER["Q8_0"], 20)


@pytest.mark.parametrize("order", ORDERS)
def test_operations(order: Order) -> None:
    z = arrays("ops")
    cases = {name.split("/")[0] for name in z.files}
    assert len(cases) == 35
    for case in sorted(cases):
        kind, _, sizes = case.partition("_")

        def recorded(name: str = "out", case: str = case) -> np.ndarray:
            return z.get(f"{case}/{name}", z.get(f"{case}/{name}_{BUILDS[order]}"))

        given = {name.split("/")[1]: z[name] for name in z.files if name.startswith(case + "/") and "out" not in name}
        if kind == "rmsnorm":
            assert same_bits(rmsnorm(given["x"][None], given["w"], 1e-5, order)[0], recorded()), case
        elif kind == "softmax":
            assert same_bits(softmax(given["x"]), recorded()), case
        elif kind == "silu":
            assert same_bits(silu(given["x"], order), recorded()), case
        elif kind == "rope":
            dim = int(sizes.split("_")[0])
            for name in "qk":
                turned = rope(given[name].reshape(1, -1, dim), given["cos"][None], given["sin"][None], halves=False)
                assert same_bits(turned.reshape(-1), recorded(f"{name}_out")), case
        elif kind == "matmul":
            if "Q2_K" in case:  # fault A3: bits in the C's order
                given["w"] = to_ggml(given["w"].reshape(-1, 84 * int(case.split("x")[1]) // 256), "Q2_K")
            type_, d, n = case.removeprefix("matmul_").rsplit("_", 1)[0], *map(int, case.rsplit("_", 1)[1].split("x"))
            w = Weight(case, NUMBER[type_], d, n, given["w"].reshape(d, -1))
            for threads in (1, 3):
                assert same_bits(matmul(given["x"][None], [w], Team(threads, order))[0][0], recorded()), case
        else:
            joined = given["a"] * given["b"] if kind == "mul" else given["a"] + given["b"]
            assert same_bits(joined, recorded()), case


def run(m: Model, ids: list[int]) -> tuple[np.ndarray, KVCache]:
    kv = KVCache(m.config)
    return np.stack([model_forward(m, kv, [token]) for token in ids]), kv


def bare(m: Model) -> Model:
    """The model without its output matrix: the final hidden state comes out as logits."""
    n = m.config.n_embd
    m.output = Weight("identity", NUMBER["F32"], n, n, np.eye(n, dtype=np.float32).view(np.uint8))
    return m


def watch(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What the last layer's blocks made last: rotated query, gated values, feed-forward's output,
    attention's output.
    """
    seen: dict[str, np.ndarray] = {}
    linear, attend = picolm.model._linear, picolm.model.attention

    def watched_linear(m: Model, layer: Any, x: np.ndarray, *names: str) -> list[np.ndarray]:
        out = linear(m, layer, x, *names)
        seen.update(
            {"xb2": out[0]} if names == ("attn_output",) else {"hb": x, "xb": out[0]} if names == ("ffn_down",) else {}
        )
        return out

    def watched_attention(q: np.ndarray, *rest: Any) -> np.ndarray:
        seen["q"] = q
        return attend(q, *rest)

    monkeypatch.setattr(picolm.model, "_linear", watched_linear)
    monkeypatch.setattr(picolm.model, "attention", watched_attention)
    return seen


def as_the_c_reads(m: Model) -> Model:
    """The model; Q2_K and Q3_K with their bits where the C looks for them (fault A3)."""
    for w in [*m.matrices[:-1], *{id(w): w for w in (m.output, m.token_embd)}.values()]:
        w.raw = to_ggml(w.raw, BLOCKS[w.type].name) if w.type in (10, 11) else w.raw
    return m


@pytest.mark.usefixtures("c_rounding")
@pytest.mark.filterwarnings("ignore:invalid value")  # q3_k's numbers are NaN in the C
@pytest.mark.parametrize(("name", "order"), list(itertools.product([*RUNNABLE, *MISREAD], ORDERS)))
def test_forward_pass_bit_for_bit(tiny: Path, name: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and hidden states of 20 steps, the last one's with fewer layers, what its blocks made,
    keys and values, RoPE's tables.
    """
    z, build = arrays("forward"), BUILDS[order]
    m = as_the_c_reads(Model(str(tiny / f"{name}.gguf"), team=Team(2, order)))
    ids = z[f"{name}/ids"].tolist()
    seen = watch(monkeypatch)
    logits, kv = run(m, ids)
    assert same_bits(logits, z[f"{name}/logits_{build}"])
    cached = np.stack([kv.keys, kv.values])[:, :, : len(ids)].reshape(2, m.config.n_layers, len(ids), -1)
    assert same_bits(cached, z[f"{name}/kv_{build}"].view(np.float16))
    assert all(map(same_bits, rope_tables(m, 0, m.config.max_seq_len, False), z[f"{name}/rope"]))
    last = np.concatenate([seen[name].reshape(-1) for name in ("q", "hb", "xb", "xb2")])
    assert same_bits(last, z[f"{name}/last_q_hb_xb_xb2_{build}"])
    zero = np.float32(0)  # hidden states pass through a sum, which makes 0 of -0
    for layers in range(m.config.n_layers):  # the last step again, with fewer layers
        cut = as_the_c_reads(Model(str(tiny / f"{name}.gguf"), team=Team(1, order)))
        del cut.layers[layers:]
        kv.truncate(len(ids) - 1)
        assert same_bits(model_forward(cut, kv, ids[-1:]), z[f"{name}/trunc_logits_{build}"][layers])
        kv.truncate(len(ids) - 1)
        assert same_bits(model_forward(bare(cut), kv, ids[-1:]), z[f"{name}/trunc_hidden_{build}"][layers] + zero)
    assert same_bits(run(bare(m), ids)[0], z[f"{name}/hidden_{build}"] + zero)


@pytest.mark.parametrize("name", [*RUNNABLE, *MISREAD, *REFUSED])
def test_forward_pass_against_float64(tiny: Path, name: str) -> None:
    """Faults A3 and A4: every type, against a float64 reference that reads it as ggml does; in one
    chunk and token by token.
    """
    z, m = arrays("spec"), Model(str(tiny / f"{name}.gguf"), team=Team(2))
    ids = z[f"{name}/ids"].tolist()
    for held in (False, True):
        if held:
            m.hold()
        kv = KVCache(m.config)
        for logits in (model_forward(m, kv, ids, every=True), run(m, ids)[0]):
            assert np.abs(logits - z[f"{name}/logits"]).max() < 4e-3
            assert (logits.argmax(1) == z[f"{name}/logits"].argmax(1)).all()


def test_fast_order_does_not_depend_on_threads(tiny: Path) -> None:
    """Fault A18 is gone with the threads that the C starts for each product; bands make the bits
    independent of their number.
    """
    runs = []
    for threads in (1, 2, 5):
        m = Model(str(tiny / "q4_k.gguf"), team=Team(threads))
        m.hold()
        runs.append(run(m, list(range(3, 15)))[0])
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


def test_generator_states() -> None:
    """Fault A12: the states are the C's; a draw has 24 bits, so that it is never 1.0, and seeds are
    mixed.
    """
    for seed in notes("sampler")["rng"]:
        state = seed["seed"]
        for recorded, number in zip(seed["states"], seed["floats"], strict=True):
            state = sampler.xorshift64(state)
            assert state == recorded
            assert abs(float(sampler.rand_float(state)) - number) <= 2.0**-24
            assert sampler.rand_float(state) < 1
    first = [sampler.rand_float(sampler.xorshift64(sampler.splitmix64(seed))) for seed in range(1, 1001)]
    assert 0.45 < np.mean(first) < 0.55  # in the C the thousand first draws are all below 0.0001
    worst = sampler.xorshift64(notes("sampler")["seed_whose_first_draw_is_1.0"])
    assert np.float32(worst >> 11) / np.float32(1 << 53) == 1.0 > sampler.rand_float(worst)


def c_draw(state: int) -> np.float32:
    return np.float32(state >> 11) / np.float32(1 << 53)


def test_sampler_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """544 recorded cases with the C's own draws in the place of ours, and the probabilities it
    leaves behind.
    """
    monkeypatch.setattr(sampler, "rand_float", c_draw)
    z = arrays("sampler")
    for case in notes("sampler")["cases"]:
        name, t = case["logits"], case["temperature"]
        left = softmax(z[f"logits/{name}"] * (np.float32(1) / np.float32(t))) if t > 0 else z[f"logits/{name}"]
        assert same_bits(left, z[f"{name}/left_t{t}"])
        if name == "nan":
            with pytest.raises(ValueError, match="not numbers"):
                sampler.Sampler(t, case["top_p"], 1).sample(z["logits/nan"])
            continue
        s = sampler.Sampler(t, case["top_p"], 1)
        s.rng_state = case["seed"] or 42
        assert [s.sample(z[f"logits/{name}"]) for _ in case["picks"]] == case["picks"], case
        assert s.rng_state == case["last_rng_state"]


def test_tiny_temperature_is_greedy() -> None:
    """Fault A17: the C divides by it and gets NaN."""
    logits = arrays("sampler")["logits/base"]
    assert sampler.Sampler(1e-39, 0.9, 1).sample(logits) == logits.argmax()
    assert sampler.Sampler(1e-37, 0.9, 1).sample(logits * 1e3) == logits.argmax()
    for bad in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            sampler.Sampler(bad, 0.9, 1)
