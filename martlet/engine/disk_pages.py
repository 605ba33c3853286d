"""KV pages that outlive the process: open the file, adopt its pages (read `build.py` first)."""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from martlet.cache.disk_slots import DiskSlots
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.config import EngineConfig
from martlet.errors import CapacityError
from martlet.formats.checkpoint import Checkpoint
from martlet.kv_types import share_granularity
from martlet.ops.interface import Backend
from martlet.runtime.disk_file import DiskFile, open_tier
from martlet.runtime.disk_format import MAX_NAME, Layout, Owner
from martlet.runtime.kv import KvMemory
from martlet.runtime.page_moves import page_bytes
from martlet.spec import ModelSpec

PACKAGES = ("formats", "models", "ops", "quant")  # the code between a model's file and its keys and values


def open_disk_pages(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, ops: Backend, kv: KvMemory, resources: ExitStack
) -> DiskFile | None:
    """The file of the second tier, or None if it is off or cannot be opened (a warning says why).

    `resources` closes it. Raises CapacityError for a size that holds no page.
    """
    if config.kv_disk is None or not config.prefix_cache:
        return None
    size = page_bytes(ops, kv.all)
    layout = Layout(config.page_size, size)
    if layout.slots_within(config.kv_disk_size) == 0:
        raise CapacityError(
            f"kv_disk_size is {config.kv_disk_size:,} bytes, and one page takes {size:,}, the smallest file"
            f" {layout.least_bytes:,}: raise it, or leave kv_disk out."
        )
    owner = Owner(
        model=(spec.name or Path(config.model).stem)[:MAX_NAME],
        fingerprint=kv_fingerprint(checkpoint, spec, ops, config.kv_dtype, config.page_size, kv.head_fingerprint),
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        page_bytes=size,
    )
    tier = open_tier(Path(config.kv_disk), config.kv_disk_size, owner)
    if tier is not None:
        resources.callback(tier.close)
    return tier


def make_cache(config: EngineConfig, pages: PagePool, tier: DiskFile | None) -> RadixCache | None:
    """The prefix cache, with the pages of the tier's file in it; None if it is off."""
    if not config.prefix_cache:
        return None
    share, fair = share_granularity(config.kv_dtype), config.policy == "fair"
    if tier is None or tier.n_slots == 0:  # 0: the disk was found full at the first try
        return RadixCache(pages, share_granularity=share, fair=fair)
    cache = RadixCache(pages, share_granularity=share, tier=DiskSlots(tier.n_slots), fair=fair)
    cache.adopt((record.slot, record.key, record.parent, record.ids) for record in tier.records())
    return cache


def kv_fingerprint(
    checkpoint: Checkpoint, spec: ModelSpec, ops: Backend, kv_dtype: str, page_size: int, head: str = ""
) -> str:
    """What the bits of a KV page depend on beside its tokens, as 32 hex digits.

    That is the model's file, the decoder as resolved, the backend, its code, and the form of the
    pages. `head` is the fingerprint of a draft head, whose keys and values are in the pages too.
    """
    digest = hashlib.sha256(code_digest(PACKAGES).encode())
    adapter = "no adapter"
    for part in (checkpoint.fingerprint(), repr(spec), ops.fingerprint(), kv_dtype, str(page_size), adapter, head):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def code_digest(packages: Sequence[str]) -> str:
    """A SHA-256 of the Python text of some of this package's folders."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
