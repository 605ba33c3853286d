"""KV types by layer under a limit, chosen at the start by measuring (read `observe/kv_quality.py` first: what is measured).

    as asked for: within the limit? → taken
    else each layer alone, the costliest ones get more bits until the whole is within it (`guard_types`) → taken

It costs a load of the model and some thousands of tokens, once: what was found is kept under a digest of all that it
depends on (`martlet/notes.py`), and the next start takes it from there.
"""

from __future__ import annotations

import codecs
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from martlet.config import EngineConfig, Origin
from martlet.engine.guard_text import GUARD_TEXT
from martlet.errors import RequestError
from martlet.formats.checkpoint import Checkpoint
from martlet.kv_types import STEEP, KvTypes, parse_kv_types
from martlet.models.families import spec_of
from martlet.models.weights import load_model, steep_layers
from martlet.observe.kv_quality import F32, KvLens, Lens, compare, guard_types, join
from martlet.ops.interface import Backend
from martlet.runtime.fingerprint import code_digest
from martlet.runtime.kv import layer_types
from martlet.saved_measurements import load_notes, save_note
from martlet.spec import ModelSpec
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["with_guarded_types"]

NOTES = "kv_guard"
BASE = parse_kv_types("f16")
WINDOW = 1024  # tokens that are computed together
MOST_WINDOWS = 4
MOST_BYTES = 1 << 18  # that are read of a text: its tokens are found at every start
LAYER_TOKENS = 256  # of the first window, for each layer alone: there are dozens of layers
LEAST_TOKENS = 128  # of a text: 4 bits begin after 64
KEPT_BYTES = 256 << 20  # of the base type's logits, for each text
Progress = Callable[[int, int], None]  # layers that are done, and in all


def with_guarded_types(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    context: int,
    make_backend: Callable[[], Backend],
    progress: Progress | None = None,
) -> EngineConfig:
    """The settings with KV types whose divergence is within `kv_guard`, known from before or measured now.

    `context` is the most tokens that are computed together.

    Raises RequestError for a text that is too short or cannot be read, and for types of layers that are not there.
    """
    limit = config.kv_guard
    assert limit is not None
    windows, of_what = _windows(config, tokenizer, max(2, min(WINDOW, context)))  # what follows one is compared
    key = _key(config, checkpoint, windows)
    known = _known(load_notes(NOTES).get(key), spec_of(checkpoint))
    if known is None:
        show = progress or (lambda done, total: None)
        known = _measured(parse_kv_types(config.kv_dtype), limit, checkpoint, make_backend, windows, show)
        if not save_note(NOTES, key, {"kv_dtype": str(known[0]), "kld": known[1]}):
            kept = "What kv_guard measured cannot be kept in MARTLET_HOME (`martlet doctor` says why): every start measures again."
            warnings.warn(kept, RuntimeWarning, stacklevel=2)
    types, kld = known
    n_tokens, said = sum(map(len, windows)), "at most" if kld <= limit else "which no choice of types brings to"
    note = (
        f"divergence {kld:.2g}, {said} {limit:g}, on {n_tokens:,} tokens of {of_what}; {config.kv_dtype} was asked for"
    )
    return config.with_value("kv_dtype", str(types), Origin.MEASURED, note)


def _windows(config: EngineConfig, tokenizer: Tokenizer, most: int) -> tuple[list[list[int]], str]:
    """The text's tokens, at most so many together, and a name for it."""
    text, of_what = GUARD_TEXT, "its own text"
    if config.kv_guard_text is not None:
        text, of_what = _read(config.kv_guard_text), Path(config.kv_guard_text).name
    ids = tokenizer.encode(text)
    if len(ids) < LEAST_TOKENS:
        raise RequestError(
            f"The text of kv_guard has {len(ids)} tokens; expected {LEAST_TOKENS} or more, better some thousands.",
            param="kv_guard_text",
        )
    size = min(most, len(ids))
    starts = range(0, len(ids) - size + 1, size)[:MOST_WINDOWS]
    first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return [[*first, *ids[start + len(first) : start + size]] for start in starts], of_what


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES)
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < MOST_BYTES)
    except OSError as error:
        raise RequestError(f"kv_guard_text: {path} cannot be read: {error.strerror}.", param="kv_guard_text") from None
    except UnicodeDecodeError:
        raise RequestError(f"kv_guard_text: {path} is not UTF-8.", param="kv_guard_text") from None


def _key(config: EngineConfig, checkpoint: Checkpoint, windows: Sequence[Sequence[int]]) -> str:
    digest = code_digest()
    parts = (checkpoint.fingerprint(), config.backend, config.kv_dtype, repr(config.kv_guard), repr(windows))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return f"{Path(config.model).name} {digest.hexdigest()[:32]}"


def _known(note: Any, spec: ModelSpec) -> tuple[KvTypes, float] | None:
    """What a note says, if it says it well; others may have written it."""
    try:
        types, kld = parse_kv_types(note["kv_dtype"]), float(note["kld"])
        layer_types(spec, types)
    except (TypeError, KeyError, ValueError, OverflowError, RequestError):
        return None
    return (types, kld) if math.isfinite(kld) else None


def _measured(
    types: KvTypes,
    limit: float,
    checkpoint: Checkpoint,
    make_backend: Callable[[], Backend],
    windows: Sequence[list[int]],
    progress: Progress,
) -> tuple[KvTypes, float]:
    ops = make_backend()
    try:
        model = load_model(checkpoint, ops, context=len(windows[0]))
        steep = steep_layers(checkpoint, model.spec, STEEP)
        types = types.guarded(steep)
        layer_types(model.spec, types)  # refuses layers that are not there
        lens = _KeepingLens(KvLens(ops, model, len(windows[0])), 4 * model.spec.vocab)
        n_layers = len(model.spec.layers)

        def mean(found: KvTypes) -> float:
            return float(join([compare(lens, BASE, found, window) for window in windows]).kld.mean())

        def costs() -> list[float]:
            return list(_each_layer(lens, types, n_layers, windows[0][:LAYER_TOKENS], progress))

        chosen, kld = guard_types(types, BASE, steep, costs, limit, mean)
        return chosen.simplest(n_layers, steep), kld
    finally:
        ops.close()


def _each_layer(lens: Lens, types: KvTypes, n_layers: int, ids: Sequence[int], progress: Progress) -> Iterator[float]:
    """What each layer costs alone, all others being as precise as they can be."""
    for layer in range(n_layers):
        progress(layer, n_layers)
        alone = KvTypes(BASE.usual, {layer: types.of(layer).name})
        yield float(compare(lens, BASE, alone, ids).kld.mean())
    progress(n_layers, n_layers)


class _KeepingLens:
    """Keeps the base type's logits of a text that is asked for again and again, unless it is long."""

    def __init__(self, lens: KvLens, row_bytes: int) -> None:
        self._lens, self._row_bytes = lens, row_bytes
        self._kept: dict[tuple[int, ...], list[F32]] = {}

    def logits(self, types: KvTypes, ids: Sequence[int]) -> Iterator[F32]:
        """See `Lens`."""
        if types != BASE or len(ids) * self._row_bytes > KEPT_BYTES:
            return self._lens.logits(types, ids)
        key = tuple(ids)
        if key not in self._kept:
            self._kept[key] = [part.copy() for part in self._lens.logits(types, ids)]
        return iter(self._kept[key])
