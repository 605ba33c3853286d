#!/usr/bin/env python3
"""Write small broken, odd or unusual GGUF files (own writer, no library) and say what a reader
ought to do.

usage: make_malformed.py OUTDIR          (writes the files and cases.json)
"""

import json
import os
import struct
import sys

import numpy as np

U32, I32, F32, BOOL, STR, ARR, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12


def s(b):
    b = b if isinstance(b, bytes) else b.encode()
    return struct.pack("<Q", len(b)) + b


def val(t, v):
    if t == STR:
        return s(v)
    if t == ARR:
        et, items = v
        return struct.pack("<IQ", et, len(items)) + b"".join(val(et, i) for i in items)
    return struct.pack({0: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}[t], v)


class G:
    def __init__(g, E=32, F=32, H=2, KV=1, L=1, ctx=32):
        r = np.random.default_rng(5)
        toks = (
            ["<unk>", "<s>", "</s>"]
            + ["<0x%02X>" % i for i in range(256)]
            + ["\u2581", "a", "b", "{", "}", '"', "[", "]", "\u2581a", "ab"]
        )
        V = len(toks)
        g.kv = {
            "general.architecture": (STR, "llama"),
            "llama.context_length": (U32, ctx),
            "llama.embedding_length": (U32, E),
            "llama.block_count": (U32, L),
            "llama.feed_forward_length": (U32, F),
            "llama.attention.head_count": (U32, H),
            "llama.attention.head_count_kv": (U32, KV),
            "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
            "llama.rope.freq_base": (F32, 10000.0),
            "llama.vocab_size": (U32, V),
            "tokenizer.ggml.model": (STR, "llama"),
            "tokenizer.ggml.tokens": (ARR, (STR, toks)),
            "tokenizer.ggml.scores": (ARR, (F32, [0.0] * 259 + [-float(i) for i in range(V - 259)])),
            "tokenizer.ggml.token_type": (ARR, (I32, [2, 3, 3] + [6] * 256 + [1] * (V - 259))),
            "tokenizer.ggml.bos_token_id": (U32, 1),
            "tokenizer.ggml.eos_token_id": (U32, 2),
        }
        hd = E // H if H else 0
        m = lambda *d: (r.standard_normal(d) * 0.3).astype("<f4")
        g.t = {"token_embd.weight": m(V, E), "output_norm.weight": 1 + m(E) * 0, "output.weight": m(V, E)}
        for l in range(L):
            b = f"blk.{l}."
            g.t.update(
                {
                    b + "attn_norm.weight": 1 + m(E) * 0,
                    b + "attn_q.weight": m(E, E),
                    b + "attn_k.weight": m(KV * hd, E),
                    b + "attn_v.weight": m(KV * hd, E),
                    b + "attn_output.weight": m(E, E),
                    b + "ffn_norm.weight": 1 + m(E) * 0,
                    b + "ffn_gate.weight": m(F, E),
                    b + "ffn_up.weight": m(F, E),
                    b + "ffn_down.weight": m(E, F),
                }
            )
        g.type, g.dims, g.off, g.ndims = {}, {}, {}, {}
        g.magic, g.version, g.align = b"GGUF", 3, 32
        g.n_tensors = g.n_kv = None
        g.extra_kv = b""
        g.extra_n = 0

    def build(g):
        out = bytearray(g.magic + struct.pack("<I", g.version))
        out += struct.pack(
            "<QQ",
            len(g.t) if g.n_tensors is None else g.n_tensors,
            (len(g.kv) + g.extra_n) if g.n_kv is None else g.n_kv,
        )
        for k, (t, v) in g.kv.items():
            out += s(k) + struct.pack("<I", t) + val(t, v)
        out += g.extra_kv
        off, data = 0, bytearray()
        for n, a in g.t.items():
            d = g.dims.get(n, list(a.shape[::-1]))
            out += s(n) + struct.pack("<I", g.ndims.get(n, len(d))) + b"".join(struct.pack("<Q", x) for x in d)
            out += struct.pack("<IQ", g.type.get(n, 0), g.off.get(n, off))
            raw = a.tobytes()
            data += raw + b"\0" * (-len(raw) % g.align)
            off = len(data)
        g.data_at = len(out) + (-len(out) % g.align)
        return bytes(out) + b"\0" * (-len(out) % g.align) + bytes(data)


CASES = []


def case(name, should, args=None):
    def deco(f):
        CASES.append((name, should, args or ["-p", "ab a", "-n", "3", "-t", "0", "-j", "1"], f))
        return f

    return deco


def kvcase(name, should, args=None, drop=(), **kv):
    def f():
        g = G()
        for k in drop:
            del g.kv[k]
        for k, v in kv.items():
            g.kv[k.replace("__", ".")] = v
        return g.build()

    CASES.append((name, should, args or ["-p", "ab a", "-n", "3", "-t", "0", "-j", "1"], f))


OK, REJ = "accept", "reject with a message and a non-zero exit status"
case("plain", OK)(lambda: G().build())
case("empty_file", REJ)(lambda: b"")
case("three_bytes", REJ)(lambda: b"GGU")
case("bad_magic", REJ)(lambda: b"GGML" + G().build()[4:])
case("version_1", REJ)(lambda: b"GGUF" + struct.pack("<I", 1) + G().build()[8:])
case("version_2", OK)(lambda: b"GGUF" + struct.pack("<I", 2) + G().build()[8:])
case("version_4", REJ)(lambda: b"GGUF" + struct.pack("<I", 4) + G().build()[8:])
case("big_endian", REJ)(lambda: b"GGUF" + struct.pack(">I", 3) + G().build()[8:])
case("header_only_no_keys", REJ)(lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
case("cut_in_metadata", REJ)(lambda: G().build()[:4096])
case("cut_in_tensor_infos", REJ)(lambda: (lambda g, b: b[: g.data_at - 500])(*(lambda g: (g, g.build()))(G())))
case("cut_in_tensor_data", REJ)(lambda: (lambda b: b[: len(b) - 40000])(G().build()))
case("short_by_200_bytes", REJ)(lambda: G().build()[:-200])


@case("huge_key_length", REJ)
def _():
    b = bytearray(G().build())
    b[24:32] = struct.pack("<Q", 1 << 62)
    return bytes(b)


@case("huge_array_length", REJ)
def _():
    g = G()
    g.extra_kv, g.extra_n = s("x.y") + struct.pack("<IIQ", ARR, U32, 1 << 60), 1
    return g.build()


@case("array_of_bad_type", REJ)
def _():
    g = G()
    g.extra_kv, g.extra_n = s("x.y") + struct.pack("<IIQ", ARR, 77, 1), 1
    return g.build()


@case("nested_arrays_1000000_deep", REJ)
def _():
    g = G()
    g.extra_kv, g.extra_n = (
        s("x.y") + struct.pack("<I", ARR) + struct.pack("<IQ", ARR, 1) * 1000000 + struct.pack("<IQ", U32, 0),
        1,
    )
    return g.build()


@case("unknown_value_type", REJ)
def _():
    g = G()
    g.extra_kv, g.extra_n = s("x.y") + struct.pack("<I", 13), 1
    return g.build()


@case("n_kv_too_large", REJ)
def _():
    g = G()
    g.n_kv = 1 << 40
    return g.build()


@case("n_tensors_wraps_malloc", REJ)
def _():
    g = G()
    g.n_tensors = 1 << 61
    return g.build()


@case("n_tensors_too_large", REJ)
def _():
    g = G()
    g.n_tensors = 1000
    return g.build()


@case("n_dims_100", REJ)
def _():
    g = G()
    g.dims["output.weight"] = [1] * 100
    return g.build()


@case("tensor_offset_past_end", REJ)
def _():
    g = G()
    g.off["blk.0.ffn_up.weight"] = 1 << 40
    return g.build()


@case("tensor_offset_unaligned", REJ)
def _():
    g = G()
    g.off["blk.0.ffn_up.weight"] = 3
    return g.build()


@case("tensor_shape_wrong", REJ)
def _():
    g = G()
    g.dims["blk.0.ffn_up.weight"] = [32, 7]
    return g.build()


for miss in ("token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_up.weight"):

    @case("missing_" + miss, REJ)
    def _(miss=miss):
        g = G()
        del g.t[miss]
        return g.build()


@case("unknown_tensor_type", REJ)
def _():
    g = G()
    g.type["blk.0.ffn_up.weight"] = 200
    return g.build()


@case("unknown_norm_type", REJ)
def _():
    g = G()
    g.type["blk.0.attn_norm.weight"] = 30
    return g.build()


@case("head_dim_512", "accept, or reject with a message")
def _():
    return G(E=512, F=32, H=1).build()


@case("layers_70", "accept, or reject with a message")
def _():
    return G(L=70).build()


@case("moe_tensors_only", REJ)
def _():
    g = G()
    g.kv["llama.expert_count"] = (U32, 2)
    g.kv["llama.expert_used_count"] = (U32, 1)
    for k in ("gate", "up", "down"):
        a = g.t.pop(f"blk.0.ffn_{k}.weight")
        g.t[f"blk.0.ffn_{k}_exps.weight"] = np.stack([a, a])
    return g.build()


@case("odd_width", "reject: 20 columns do not fill a block of 32")
def _():
    g = G(E=20, F=32, H=2)
    g.type["blk.0.ffn_up.weight"] = 8
    return g.build()


A = "llama.attention."
kvcase("head_count_0", REJ, **{A + "head_count": (U32, 0)})
kvcase("head_count_missing", REJ, drop=[A + "head_count"])
kvcase("head_count_array", "accept when all equal, else reject", **{A + "head_count": (ARR, (U32, [2]))})
kvcase(
    "head_count_kv_missing",
    "accept: head_count_kv defaults to head_count (here the shapes then mismatch: reject)",
    drop=[A + "head_count_kv"],
)
kvcase("head_count_kv_0", REJ, **{A + "head_count_kv": (U32, 0)})
kvcase("head_count_kv_more_than_heads", REJ, **{A + "head_count_kv": (U32, 4)})
kvcase("embedding_length_0", REJ, **{"llama.embedding_length": (U32, 0)})
kvcase("embedding_length_negative", REJ, **{"llama.embedding_length": (I32, -32)})
kvcase("block_count_more_than_tensors", REJ, **{"llama.block_count": (U32, 2)})
kvcase("block_count_missing", REJ, drop=["llama.block_count"])
kvcase("feed_forward_missing", REJ, drop=["llama.feed_forward_length"])
kvcase("context_0", REJ, **{"llama.context_length": (U32, 0)})
kvcase("context_missing", "accept with a stated default, or reject", drop=["llama.context_length"])
kvcase("context_2e32_minus_1", REJ, **{"llama.context_length": (U32, 0xFFFFFFFF)})
kvcase("context_2e30", "accept (clamp, or allocate lazily), or reject", **{"llama.context_length": (U32, 1 << 30)})
kvcase(
    "context_2e30_c32",
    OK,
    args=["-p", "ab a", "-n", "3", "-t", "0", "-j", "1", "-c", "32"],
    **{"llama.context_length": (U32, 1 << 30)},
)
kvcase("vocab_size_key_too_large", REJ, **{"llama.vocab_size": (U32, 100000)})
kvcase("vocab_size_key_too_small", REJ, **{"llama.vocab_size": (U32, 100)})
kvcase("vocab_size_key_missing", OK, drop=["llama.vocab_size"])
kvcase("bos_out_of_range", REJ, **{"tokenizer.ggml.bos_token_id": (U32, 0x7FFFFFF)})
kvcase("bos_minus_1", "accept: no BOS", **{"tokenizer.ggml.bos_token_id": (U32, 0xFFFFFFFF)})
kvcase(
    "eos_out_of_range_json",
    REJ,
    args=["-p", "ab a", "-n", "3", "-t", "0", "-j", "1", "--json"],
    **{"tokenizer.ggml.eos_token_id": (U32, 0x7FFFFFF)},
)
kvcase("add_bos_false", "accept: no BOS token in front", **{"tokenizer.ggml.add_bos_token": (BOOL, 0)})
kvcase("add_space_prefix_false", "accept: no leading space", **{"tokenizer.ggml.add_space_prefix": (BOOL, 0)})
kvcase("alignment_0", REJ, **{"general.alignment": (U32, 0)})


@case(
    "alignment_56_not_a_power_of_two",
    "accept or reject with a message (the specification asks for a multiple of 8; the data is 56-aligned)",
)
def _():
    g = G()
    g.kv["general.alignment"] = (U32, 56)
    g.align = 56
    return g.build()


kvcase(
    "general_embedding_length",
    "accept: the general. key does not exist and means nothing",
    **{"general.embedding_length": (U32, 16)},
)
kvcase("context_2e32_plus_16_as_uint64", OK, **{"llama.context_length": (U64, (1 << 32) + 16)})
kvcase("tokens_not_strings", REJ, **{"tokenizer.ggml.tokens": (ARR, (U32, list(range(269))))})
kvcase("tokens_missing", REJ, drop=["tokenizer.ggml.tokens"])
kvcase("scores_missing", "accept or reject with a message", drop=["tokenizer.ggml.scores"])
kvcase("scores_float64", REJ, **{"tokenizer.ggml.scores": (ARR, (F64, [0.0] * 269))})
kvcase("rope_base_float64", "accept: 500000", **{"llama.rope.freq_base": (F64, 500000.0)})
kvcase("rms_eps_large", "accept: epsilon 0.5", **{A + "layer_norm_rms_epsilon": (F32, 0.5)})
kvcase(
    "rope_scaling_linear",
    "accept: positions scaled by 1/4, or reject",
    **{"llama.rope.scaling.type": (STR, "linear"), "llama.rope.scaling.factor": (F32, 4.0)},
)
kvcase("rope_dim_half", "accept: only half of each head rotated", **{"llama.rope.dimension_count": (U32, 8)})
kvcase("other_architecture", REJ, **{"general.architecture": (STR, "qwen2")})
kvcase("gpt2_tokenizer", "accept with byte-level BPE, or reject", **{"tokenizer.ggml.model": (STR, "gpt2")})


def main(out):
    os.makedirs(out, exist_ok=True)
    js = []
    for name, should, args, f in CASES:
        b = f()
        with open(os.path.join(out, name + ".gguf"), "wb") as fh:
            fh.write(b)
        js.append({"name": name, "bytes": len(b), "should": should, "args": args})
    with open(os.path.join(out, "cases.json"), "w") as fh:
        json.dump(js, fh, indent=1)
    print(len(js), "files")


if __name__ == "__main__":
    main(sys.argv[1])
