"""Weights kept as packed, for a start without waiting (read `ops/cpu/packed_file.py` next)."""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from martlet.config import EngineConfig
from martlet.engine.disk_pages import code_digest
from martlet.formats.checkpoint import Checkpoint
from martlet.ops.interface import Ability, Backend, PacksToFile

PACKAGES = ("formats", "models", "ops/cpu", "quant")  # the code between a model's file and its packed weights


def packed_weights(config: EngineConfig, checkpoint: Checkpoint, ops: Backend) -> AbstractContextManager[Any]:
    """Within it, weights come from the model's packed file, or are written to it.

    Nothing happens without the option `packed`. UnsupportedError for a backend that keeps none.
    """
    if config.packed is None:
        return nullcontext()
    ops.abilities.require(Ability.PACKED)
    digest = hashlib.sha256(f"{checkpoint.fingerprint()} {code_digest(PACKAGES)}".encode()).hexdigest()
    file = f"{checkpoint.path.stem[:80]}-{digest[:16]}"
    return cast(PacksToFile, ops).packed_file(Path(config.packed), file)
