"""A prompt's keys and values in a file, so that the next run need not compute them.

    "PCK2" n_tokens n_layers kv_dim | fingerprint of the model (32 bytes) | tokens (int32) | keys | values | SHA-256 of all that

Keys and values are float16 [layer, position, kv_dim], as in the C. The longest beginning that file and prompt share is used, short of the
prompt's last token, whose logits are needed.

Differences from the C (model.c): its file has neither tokens nor model nor check; after a hit it feeds the last token again, one late.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from picolm.model import KVCache, Model

MAGIC, C_MAGIC = b"PCK2", b"PCVK"
HEADER = 48


def fingerprint(m: Model) -> bytes:
    """Of what keys depend on: order of sums, metadata, directory, each tensor's first bytes (in all they may be gigabytes)."""
    digest = hashlib.sha256(m.team.order.encode())
    digest.update(m.file.map[: m.file.data_start])
    for _, _, start in m.file.tensors.values():
        start += m.file.data_start
        digest.update(m.file.map[start : start + 4096])
    return digest.digest()


def kvcache_save(m: Model, kv: KVCache, path: str, n: int) -> None:
    """Write the first n positions, in a new file that then takes the old one's place."""
    shape = np.array([n, m.config.n_layers, m.config.kv_dim], "<u4")
    parts = [MAGIC, shape.tobytes(), fingerprint(m), np.array(kv.tokens[:n], "<i4").tobytes()]
    parts += [np.ascontiguousarray(a[:, :n]).astype("<f2").tobytes() for a in (kv.keys, kv.values)]
    body = b"".join(parts)
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(body + hashlib.sha256(body).digest())
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"cannot write the cache {path}: {error}") from None


def kvcache_load(m: Model, path: str, prompt: list[int]) -> tuple[KVCache, list[str]]:
    """A cache that holds what the file has of this prompt's beginning, and what to tell about it. A damaged file, one of another
    model, and the C's own kind count as empty, and are replaced at the end of the run; a file that is no cache is refused."""
    kv, c = KVCache(m.config), m.config
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return kv, []
    except OSError as error:
        raise ValueError(f"cannot read the cache {path}: {error}") from None
    if data[:4] == C_MAGIC:
        return kv, ["kvcache_load: a file of the C program, which names neither its tokens nor its model: not used"]
    if data and data[:4] != MAGIC:
        raise ValueError(f"{path} is not a cache file, and is not overwritten: name another, or delete it")
    n, layers, kv_dim = np.frombuffer(data[4:16].ljust(12, b"\0"), "<u4").tolist()
    size = 2 * layers * n * kv_dim  # numbers
    if len(data) != HEADER + 4 * n + 2 * size + 32 or hashlib.sha256(data[:-32]).digest() != data[-32:]:
        return kv, ["kvcache_load: the file is damaged: not used"]
    if (layers, kv_dim) != (c.n_layers, c.kv_dim) or data[16:48] != fingerprint(m):
        return kv, ["kvcache_load: the file is of another model, or of another order of sums: not used"]
    cached = np.frombuffer(data, "<i4", n, HEADER)
    limit = min(n, len(prompt) - 1, c.max_seq_len)
    same = int(np.argmin(np.append(cached[:limit] == prompt[:limit], False)))
    kv.extend(prompt[:same])
    numbers = np.frombuffer(data, "<f2", size, HEADER + 4 * n).reshape(2, layers, n, c.n_kv_heads, c.head_dim)
    kv.keys[:, :same], kv.values[:, :same] = numbers[:, :, :same]
    return kv, [f"KV cache loaded: {n} positions from {path}"]
