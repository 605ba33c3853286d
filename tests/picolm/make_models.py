#!/usr/bin/env python3
"""Make the tiny GGUF models used by the picoLM golden data.

Everything is deterministic: NumPy PCG64 streams with fixed seeds, own K-quant
encoders (plain min/max fits, laid out as ggml lays the blocks out), the `gguf`
package for the container and for the simple types.

usage: gen_models.py OUTDIR
"""

import json
import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QT
from make_blocks import encode

SP = "\u2581"  # SentencePiece space mark

# --------------------------------------------------------------------------
# vocabulary: SentencePiece style, hierarchical pieces trained on a small text
# --------------------------------------------------------------------------
CORPUS = """
the cat sat on the mat and the dog ran to the park
once upon a time there was a small model that could read and write
hello world hello there the quick brown fox jumps over the lazy dog
to be or not to be that is the question
{"name": "anna", "age": 31, "tags": ["a", "b"]}
{"name": "tom", "list": [1, 2, 3], "ok": true, "none": null}
[{"id": 1}, {"id": 2}]
{"a": {"b": {"c": []}}}
for i in range(10):
    print(i)
    return i
the café is near the zoo and the zoo is near the café
""".strip("\n")

# pieces that must exist whatever the training picks (quirks of the C tokenizer
# and of its grammar are visible with them)
FORCED = [
    SP * 2,
    "o" + SP,
    '{"',
    '":',
    '",',
    '"}',
    "}}",
    "[{",
    "}]",
    "[]",
    "{}",
    '"]',
    "}{",
    '\\"',
    "\\\\",
    "ab",
    "abc",
    SP + "{",
    SP + "}",
    SP + "[",
    SP + "]",
    "},",
    "],",
    "]}",
    '"}]',
    '{"a',
    '""',
    '"{"',
    "[[",
    "]]",
]
# single characters of the vocabulary; ones that the texts use but that are not
# here fall back to byte tokens
CHARS = list(" abcdefghijklmnopqrstuvwxyzTHEIO0123456789.,:;!?'\"(){}[]<>/\\|_-+*=é日")


def train_pieces(n_merges):
    words = {}
    for line in CORPUS.split("\n"):
        for w in (SP + line.replace(" ", SP)).replace(SP, " " + SP).split():
            words[tuple(w)] = words.get(tuple(w), 0) + 1
    pieces = []
    while len(pieces) < n_merges:
        cnt = {}
        for w, c in words.items():
            for a, b in zip(w, w[1:]):
                cnt[a + b] = cnt.get(a + b, 0) + c
        if not cnt:
            break
        best = min(cnt, key=lambda p: (-cnt[p], p))
        if cnt[best] < 2:
            break
        pieces.append(best)
        new = {}
        for w, c in words.items():
            out, i = [], 0
            while i < len(w):
                if i + 1 < len(w) and w[i] + w[i + 1] == best:
                    out.append(best)
                    i += 2
                else:
                    out.append(w[i])
                    i += 1
            new[tuple(out)] = new.get(tuple(out), 0) + c
        words = new
    return pieces


def build_vocab(size=416):
    toks = ["<unk>", "<s>", "</s>"]
    types = [2, 3, 3]
    scores = [0.0, 0.0, 0.0]
    for i in range(256):
        toks.append("<0x%02X>" % i)
        types.append(6)
        scores.append(0.0)
    chars = [SP if c == " " else c for c in CHARS]
    room = size - len(toks) - len(chars)
    pieces = []
    for p in FORCED + train_pieces(400):
        if p not in pieces and p not in chars:
            pieces.append(p)
    pieces = pieces[:room]
    assert len(pieces) == room, (len(pieces), room)
    # a forced piece is only reachable when some split of it is in the
    # vocabulary; the forced ones here are two-part joins of chars/pieces
    rng = np.random.default_rng(7)
    order = rng.permutation(len(pieces))
    # long trained pieces keep their training order, forced ones are spread in
    rank = {p: i for i, p in enumerate(sorted(pieces, key=lambda p: (len(p) > 3, order[pieces.index(p)])))}
    pieces.sort(key=lambda p: rank[p])
    for r, p in enumerate(pieces):
        toks.append(p)
        types.append(1)
        scores.append(-float(r) - 0.5 if r % 7 == 0 else -float(r))
    for k, c in enumerate(chars):
        toks.append(c)
        types.append(1)
        scores.append(-float(len(pieces) + k))
    assert len(set(toks)) == len(toks) == size
    return toks, scores, types


# --------------------------------------------------------------------------
# models
# --------------------------------------------------------------------------
BASE = dict(
    n_embd=256,
    n_ffn=256,
    n_heads=8,
    n_kv=2,
    n_layers=2,
    ctx=96,
    base=10000.0,
    vocab_key=True,
    tied=False,
    align=None,
    norm=QT.F32,
    hdr_version=3,
)
SPECS = {
    # name: (weight type, overrides, seed)
    "f32": (QT.F32, dict(n_layers=1), 101),
    "f16": (QT.F16, dict(n_heads=4, n_kv=4, n_layers=1, base=500000.0, norm=QT.F16), 102),
    "q8_0": (QT.Q8_0, dict(), 103),
    "q4_0": (QT.Q4_0, dict(align=64), 104),
    "q2_k": (QT.Q2_K, dict(), 105),
    "q3_k": (QT.Q3_K, dict(), 106),
    "q4_k": (QT.Q4_K, dict(n_ffn=512, vocab_key=False), 107),
    "q6_k": (QT.Q6_K, dict(), 108),
    "mix_q4km": (QT.Q4_K, dict(n_kv=4, mix={"attn_v": QT.Q6_K, "ffn_down": QT.Q6_K, "output": QT.Q6_K}), 109),
    "tied_q4_0": (QT.Q4_0, dict(tied=True, n_layers=1, hdr_version=2, drop_rope_base=True), 110),
    # not accepted by picoLM (it stops at the first row of such a type)
    "bad_q5_k": (QT.Q5_K, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 111),
    "bad_q5_0": (QT.Q5_0, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 112),
    "bad_q5_1": (QT.Q5_1, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 113),
    "bad_q4_1": (QT.Q4_1, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 114),
    "bad_bf16": (QT.BF16, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 115),
}


def float_weights(c, seed, V):
    r = np.random.default_rng(seed)

    def mat(rows, cols, gain=1.0):
        return (r.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    E, F = c["n_embd"], c["n_ffn"]
    kv = c["n_kv"] * (E // c["n_heads"])
    w = {"token_embd.weight": (r.standard_normal((V, E)) * 0.5).astype(np.float32)}
    for l in range(c["n_layers"]):
        b = f"blk.{l}."
        w[b + "attn_norm.weight"] = (1 + 0.1 * r.standard_normal(E)).astype(np.float32)
        w[b + "attn_q.weight"] = mat(E, E, 1.6)
        w[b + "attn_k.weight"] = mat(kv, E, 1.6)
        w[b + "attn_v.weight"] = mat(kv, E, 1.2)
        w[b + "attn_output.weight"] = mat(E, E)
        w[b + "ffn_norm.weight"] = (1 + 0.1 * r.standard_normal(E)).astype(np.float32)
        w[b + "ffn_gate.weight"] = mat(F, E, 1.2)
        w[b + "ffn_up.weight"] = mat(F, E, 1.2)
        w[b + "ffn_down.weight"] = mat(E, F)
    w["output_norm.weight"] = (1 + 0.1 * r.standard_normal(E)).astype(np.float32)
    if not c["tied"]:
        w["output.weight"] = mat(V, E, 3.0)
    return w


def type_of(name, qt, c):
    if name.endswith("norm.weight"):
        return c["norm"]
    for k, t in c.get("mix", {}).items():
        if f".{k}." in "." + name:
            return t
    return qt


def write_model(path, name, vocab, spec):
    qt, over, seed = spec
    c = {**BASE, **over}
    toks, scores, types = vocab
    w = float_weights(c, seed, len(toks))
    g = gguf.GGUFWriter(path, "llama")
    if c["align"]:
        g.add_custom_alignment(c["align"])
    g.add_name("tiny-" + name)
    g.add_context_length(c["ctx"])
    g.add_embedding_length(c["n_embd"])
    g.add_block_count(c["n_layers"])
    g.add_feed_forward_length(c["n_ffn"])
    g.add_head_count(c["n_heads"])
    g.add_head_count_kv(c["n_kv"])
    g.add_layer_norm_rms_eps(1e-5)
    if not c.get("drop_rope_base"):
        g.add_rope_freq_base(c["base"])
    g.add_rope_dimension_count(c["n_embd"] // c["n_heads"])
    if c["vocab_key"]:
        g.add_vocab_size(len(toks))
    g.add_tokenizer_model("llama")
    g.add_token_list(toks)
    g.add_token_scores(scores)
    g.add_token_types(types)
    g.add_bos_token_id(1)
    g.add_eos_token_id(2)
    g.add_unk_token_id(0)
    g.add_add_bos_token(True)
    for n, a in w.items():
        t = type_of(n, qt, c)
        g.add_tensor(
            n,
            encode(a if a.ndim == 2 else a[None], t)
            if a.ndim == 2
            else a.astype(np.float16 if t == QT.F16 else np.float32),
            raw_dtype=t,
        )
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    if c["hdr_version"] != 3:
        with open(path, "r+b") as f:
            f.seek(4)
            f.write(int(c["hdr_version"]).to_bytes(4, "little"))
    return {
        "file": os.path.basename(path),
        "weight_type": qt.name,
        "seed": seed,
        **{
            k: (v.name if isinstance(v, QT) else {a: b.name for a, b in v.items()} if k == "mix" else v)
            for k, v in c.items()
        },
        "bytes": os.path.getsize(path),
    }


# --------------------------------------------------------------------------
# the quirk vocabulary: makes the x86 (signed char) lookup bug visible, plus
# odd token strings.  Tokenizer only; the weights are one tiny layer.
# --------------------------------------------------------------------------
def quirk_vocab():
    toks = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % i for i in range(256)]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * 259
    extra = [  # (token, score, type)
        (SP, -10, 1),
        ("a", -11, 1),
        ("b", -12, 1),
        ("c", -13, 1),
        ("x", -14, 1),
        # every one of these has "a" or the space mark as a proper prefix and
        # continues with a byte >= 0x80
        ("a\u00e9", -20, 1),
        ("a\u65e5", -21, 1),
        ("a\U0001f600", -22, 1),
        ("a" + SP, -23, 1),
        (SP + "\u00e9", -24, 1),
        (SP + "\u65e5", -25, 1),
        (SP + SP, -26, 1),
        (SP + SP + SP, -27, 1),
        ("b\u00e9", -28, 1),
        ("ab", -5, 1),
        ("abc", -4, 1),
        ("ba", -6, 1),
        (SP + "a", -7, 1),
        (SP + "b", -8, 1),
        ("x" + SP + "x", -3, 1),
        ("x" + SP, -3.5, 1),
        (SP + "x", -3.6, 1),
        ("<0xZZ>", -50, 1),
        ("<0x0A>tail", -51, 1),
        ("<0x", -52, 1),
        ("<", -60, 1),
        ("/", -61, 1),
        ("s", -62, 1),
        (">", -63, 1),
        ("</", -64, 1),
        ("s>", -65, 1),
        ("", -70, 1),
        ("<s", -66, 1),
        ("\u00e9", -71, 1),
        ("0", -72, 1),
        ("A", -73, 1),
        # a merge that the byte fall-back hides: U+1F600 is not in the vocabulary, "b<U+1F600>" is
        ("b\U0001f600", -2, 1),
        # user defined token (llama.cpp matches it before anything else)
        ("<|u|>", -80, 4),
        ("|", -81, 1),
        ("u", -82, 1),
    ]
    for t, s, ty in extra:
        toks.append(t)
        scores.append(float(s))
        types.append(ty)
    return toks, scores, types


def main(out):
    os.makedirs(out, exist_ok=True)
    vocab = build_vocab()
    info = {"vocab_size": len(vocab[0]), "models": {}}
    for name, spec in SPECS.items():
        p = os.path.join(out, name + ".gguf")
        info["models"][name] = write_model(p, name, vocab, spec)
        print(name, info["models"][name]["bytes"])
    qv = quirk_vocab()
    p = os.path.join(out, "quirk_vocab.gguf")
    info["models"]["quirk_vocab"] = write_model(
        p, "quirk_vocab", qv, (QT.Q4_0, dict(n_layers=1, n_heads=4, n_kv=1, tied=True), 116)
    )
    info["models"]["quirk_vocab"]["vocab_size"] = len(qv[0])
    print("quirk_vocab", info["models"]["quirk_vocab"]["bytes"])
    with open(os.path.join(out, "models.json"), "w") as f:
        json.dump(info, f, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
