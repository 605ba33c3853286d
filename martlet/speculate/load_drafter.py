"""Opens and packs draft heads: opened before memory is planned, packed after the model.

Read `engine/build.py` first.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from martlet.config import EngineConfig
from martlet.errors import RequestError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.eagle_head import HeadFile, load_head, open_head
from martlet.models.medusa_heads import MedusaFile, load_medusa, open_medusa
from martlet.models.mtp_layers import open_own_head
from martlet.models.weights import Model, output_rows
from martlet.ops.backends import abilities_of
from martlet.ops.interface import Ability, Backend, StepLimits
from martlet.runtime.kv import KvMemory
from martlet.spec import ModelSpec
from martlet.speculate.eagle import HeadDrafter
from martlet.speculate.medusa import MedusaDrafter

SHIPPED = Path(__file__).parents[1] / "heads"


def open_draft_head(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, resources: ExitStack
) -> HeadFile | MedusaFile | None:
    """The head that the settings name; None: no head. `resources` closes its file; mtp: the model's
    own.

    Raises RequestError for a missing file, FormatError and UnsupportedError for a head that does
    not fit the model.
    """
    kind, _, path = config.draft.partition("=")
    if kind not in ("eagle", "medusa", "mtp"):
        return None
    if kind == "eagle":
        path = _shipped().get(path, path) if not Path(path).exists() else path
    if kind != "mtp" and not Path(path).exists():
        known = f", or one that comes with Martlet: eagle={' or eagle='.join(_shipped())}"
        raise RequestError(f"There is no file or folder {path!r}: give the path of a draft head{known}.", param="draft")
    abilities_of(config).require(Ability.HEADS)
    if kind == "mtp":
        return open_own_head(checkpoint, spec)
    head = open_head(path, spec) if kind == "eagle" else open_medusa(path, spec)
    resources.callback(head.checkpoint.close)
    return head


def _shipped() -> dict[str, str]:
    """Folders of the heads that come with Martlet, by name (docs/speculation.md: their making)."""
    return {folder.name: str(folder) for folder in sorted(SHIPPED.glob("*"))}


def with_head_pages(
    head: HeadFile | MedusaFile | None, model: Model, kv: KvMemory, ops: Backend, config: EngineConfig, n_pages: int
) -> tuple[Model, KvMemory]:
    """The model with the features that the head reads, and the memory with the head's pages."""
    if head is None:
        return model, kv
    model = replace(model, features=head.features)
    if isinstance(head, MedusaFile):  # it has no keys and values
        return model, kv
    mixer = head.spec.layers[0].mixer
    cache = ops.kv_cache(n_pages + config.max_seqs, config.page_size, mixer.n_kv_heads, mixer.head_dim, "f16")
    return model, replace(kv, head=cache, head_fingerprint=head.checkpoint.fingerprint())


def load_drafter(
    head: HeadFile | MedusaFile | None,
    checkpoint: Checkpoint,
    model: Model,
    kv: KvMemory,
    ops: Backend,
    limits: StepLimits,
    page_size: int,
    n_pages: int,
) -> HeadDrafter | MedusaDrafter | None:
    """Pack and warm the head, if there is one; its spare pages follow the model's `n_pages`."""
    if head is None:
        return None
    drafter: HeadDrafter | MedusaDrafter
    if isinstance(head, MedusaFile):
        drafter = MedusaDrafter(ops, load_medusa(head, ops, model), model.spec.hidden, limits)
        drafter.warm()
        return drafter
    loaded = load_head(head, ops, model, partial(output_rows, checkpoint, model.spec))
    drafter = HeadDrafter(ops, model, loaded, kv.head, limits, page_size, n_pages)
    drafter.warm()
    return drafter
