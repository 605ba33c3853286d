"""Weights as blocks, for the models that `make_models.py` writes: K-quants by plain min/max fits,
laid out as ggml lays them out.

x: float32 [nblk, 256] -> uint8 [nblk, bytes]
"""

import numpy as np
from gguf import GGMLQuantizationType as QT
from gguf import quants as gq


def f16b(a):
    return np.ascontiguousarray(a.astype("<f2")).view(np.uint8).reshape(len(a), 2)


def _ratio(a, b):
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def pack_k4_scales(sc, mn):
    """8 six-bit scales and 8 six-bit mins -> 12 bytes (ggml's Q4_K/Q5_K packing)."""
    out = np.zeros((len(sc), 12), np.uint8)
    out[:, 0:4] = (sc[:, 0:4] & 63) | ((sc[:, 4:8] >> 4) << 6)
    out[:, 4:8] = (mn[:, 0:4] & 63) | ((mn[:, 4:8] >> 4) << 6)
    out[:, 8:12] = (sc[:, 4:8] & 15) | ((mn[:, 4:8] & 15) << 4)
    return out


def _affine(x, nsub, qmax, smax):
    s = x.reshape(len(x), nsub, 256 // nsub)
    mn = np.maximum(0, -s.min(2))
    sc = (s.max(2) + mn) / qmax
    d = (sc.max(1) / smax).astype(np.float16).astype(np.float32)
    dm = (mn.max(1) / smax).astype(np.float16).astype(np.float32)
    qs = np.clip(np.rint(_ratio(sc, d[:, None])), 0, smax).astype(np.uint8)
    qm = np.clip(np.rint(_ratio(mn, dm[:, None])), 0, smax).astype(np.uint8)
    D = (d[:, None] * qs)[:, :, None]
    M = (dm[:, None] * qm)[:, :, None]
    q = np.clip(np.rint(_ratio(s + M, np.broadcast_to(D, s.shape))), 0, qmax).astype(np.uint8)
    return d, dm, qs, qm, q.reshape(len(x), 256)


def enc_q2_k(x):
    d, dm, qs, qm, q = _affine(x, 16, 3, 15)
    g = q.reshape(-1, 2, 4, 32)  # half, shift, lane
    packed = g[:, :, 0] | (g[:, :, 1] << 2) | (g[:, :, 2] << 4) | (g[:, :, 3] << 6)
    return np.concatenate([qs | (qm << 4), packed.reshape(len(x), 64), f16b(d), f16b(dm)], 1)


def enc_q4_k(x):
    d, dm, qs, qm, q = _affine(x, 8, 15, 63)
    g = q.reshape(-1, 4, 2, 32)
    packed = (g[:, :, 0] | (g[:, :, 1] << 4)).reshape(len(x), 128)
    return np.concatenate([f16b(d), f16b(dm), pack_k4_scales(qs, qm), packed], 1)


def enc_q5_k(x):
    d, dm, qs, qm, q = _affine(x, 8, 31, 63)
    g = q.reshape(-1, 4, 2, 32)
    lo, hi = g & 15, g >> 4
    packed = (lo[:, :, 0] | (lo[:, :, 1] << 4)).reshape(len(x), 128)
    qh = np.zeros((len(x), 32), np.uint8)
    for j in range(4):
        qh |= (hi[:, j, 0] << (2 * j)) | (hi[:, j, 1] << (2 * j + 1))
    return np.concatenate([f16b(d), f16b(dm), pack_k4_scales(qs, qm), qh, packed], 1)


def _signed(x, qlo, qhi, smax):
    s = x.reshape(len(x), 16, 16)
    sc = np.abs(s).max(2) / qhi
    d = (sc.max(1) / smax).astype(np.float16).astype(np.float32)
    qs = np.clip(np.rint(_ratio(sc, d[:, None])), 0, smax).astype(np.int32)
    # alternate the sign of the block scale so that negative scales are exercised
    sign = np.where((np.arange(16) % 3) == 1, -1, 1)[None]
    qs = qs * sign
    D = (d[:, None] * qs)[:, :, None]
    q = np.clip(np.rint(_ratio(s, np.broadcast_to(D, s.shape))), qlo, qhi).astype(np.int32)
    return d, qs, q.reshape(len(x), 256)


def enc_q3_k(x):
    d, sc, q = _signed(x, -4, 3, 31)
    q = (q + 4).astype(np.uint8)
    g = q.reshape(-1, 2, 4, 32)
    lo, hi = g & 3, g >> 2
    packed = lo[:, :, 0] | (lo[:, :, 1] << 2) | (lo[:, :, 2] << 4) | (lo[:, :, 3] << 6)
    hm = np.zeros((len(x), 32), np.uint8)
    for n in range(2):
        for j in range(4):
            hm |= hi[:, n, j] << (4 * n + j)
    u = (sc + 32).astype(np.uint8)
    s12 = np.zeros((len(x), 12), np.uint8)
    s12[:, 0:8] = (u[:, 0:8] & 15) | ((u[:, 8:16] & 15) << 4)
    for k in range(4):
        s12[:, 8:12] |= (u[:, 4 * k : 4 * k + 4] >> 4) << (2 * k)
    return np.concatenate([hm, packed.reshape(len(x), 64), s12, f16b(d)], 1)


def enc_q6_k(x):
    d, sc, q = _signed(x, -32, 31, 127)
    q = (q + 32).astype(np.uint8)
    g = q.reshape(-1, 2, 4, 32)
    lo, hi = g & 15, g >> 4
    ql = np.concatenate([lo[:, :, 0] | (lo[:, :, 2] << 4), lo[:, :, 1] | (lo[:, :, 3] << 4)], 2)
    qh = hi[:, :, 0] | (hi[:, :, 1] << 2) | (hi[:, :, 2] << 4) | (hi[:, :, 3] << 6)
    return np.concatenate(
        [ql.reshape(len(x), 128), qh.reshape(len(x), 64), sc.astype(np.int8).view(np.uint8), f16b(d)], 1
    )


KENC = {QT.Q2_K: enc_q2_k, QT.Q3_K: enc_q3_k, QT.Q4_K: enc_q4_k, QT.Q5_K: enc_q5_k, QT.Q6_K: enc_q6_k}


def encode(w, qt):
    w = np.ascontiguousarray(w, np.float32)
    if qt == QT.F32:
        return w
    if qt == QT.F16:
        return w.astype(np.float16)
    if qt in KENC:
        rows = w.shape[0]
        return np.ascontiguousarray(KENC[qt](w.reshape(-1, 256)).reshape(rows, -1))
    return gq.quantize(w, qt)
