"""What the bits of a KV page depend on, but for its tokens: kept pages are used only where all of
it is the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from martlet.formats.checkpoint import Checkpoint
from martlet.ops.interface import Backend
from martlet.spec import ModelSpec

__all__ = ["code_digest", "kv_fingerprint"]

PACKAGES = ("models", "ops", "quant")  # the code between a model's file and its keys and values


def kv_fingerprint(
    checkpoint: Checkpoint, spec: ModelSpec, ops: Backend, kv_dtype: str, page_size: int, head: str = ""
) -> str:
    """32 hex digits of the model's file, the decoder as it was resolved, the backend, its code, and
    the pages' form.

    `head` is the fingerprint of a draft head, whose keys and values are in the pages too.
    """
    digest = code_digest()
    adapter = "no adapter"
    for part in (checkpoint.fingerprint(), repr(spec), ops.fingerprint(), kv_dtype, str(page_size), adapter, head):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def code_digest() -> hashlib._Hash:
    """A SHA-256 that has taken in the code between a model's file and its keys and values; more may
    follow.
    """
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest
