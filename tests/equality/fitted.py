"""Draft heads, and a model's own layer for multi-token prediction, fitted to some answers: so some
guesses are right, and others are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loads import Load
from numpy.typing import NDArray
from safetensors.numpy import load_file
from test_medusa import write as write_medusa
from test_mtp import EPS
from test_mtp import write as write_model
from tiny_head import fit_head, followed

from martlet import LLM
from martlet.types import Request

F32 = NDArray[np.float32]
HEADS = 3
_FITTED: dict[tuple[Path, int, str, str], Path] = {}


def fitted(path: Path, load: Load, kv_dtype: str, draft: str, open_: Callable[[str], LLM], folder: Path) -> Path:
    """A head ("head", "medusa") that knows some of a load's answers, or the model with a layer that
    does ("mtp"): made once.

    `open_` opens an engine whose `draft` is as it says.
    """
    key = path, id(load), kv_dtype, draft
    if key not in _FITTED:
        fit = {"head": fit_head, "medusa": _fit_medusa, "mtp": _fit_own_layer}[draft]
        _FITTED[key] = fit(open_, path, load.requests, folder)
    return _FITTED[key]


def _answered(llm: Any, requests: Sequence[Request]) -> list[tuple[int, list[int], F32]]:
    """Of each sequence the first position whose next id but one was answered, its ids, and the
    features of all positions but the last.
    """
    found = followed(llm)
    for request in requests:
        llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
    made = []
    for places in found.values():
        ids = list(next(iter(places.values()))[1])
        if sorted(places) == list(range(len(ids) - 1)):
            n_known = max(len(r.prompt_ids) for r in requests if list(r.prompt_ids) == ids[: len(r.prompt_ids)])
            made.append((n_known - 2, ids, np.array([places[p][0] for p in range(len(ids) - 1)])))
    return made


def _solved(x: Any, wanted: Any) -> F32:
    """The matrix that makes `wanted` of x, by ridge regression."""
    found: F32 = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ wanted).T.astype(np.float32)
    return found


def _fit_medusa(llm_of: Any, path: Path, requests: Sequence[Request], folder: Path) -> Path:
    """Heads whose blocks do nothing, and whose output rows are fitted."""
    with LLM(str(path), backend="null", threads=1) as llm:
        hidden = llm._parts.spec.hidden
    config: dict[str, Any] = {"num_heads": HEADS, "num_hidden_layers": 1, "hidden_size": hidden}

    def tensors(outputs: Sequence[F32], ids: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"token_map": np.array(ids)}
        for head, rows in enumerate(outputs):
            block = f"medusa_heads.blocks.{head}.layers.0"
            made[f"{block}.weight"] = np.zeros((hidden, hidden), np.float32)
            made[f"{block}.bias"] = np.zeros(hidden, np.float32)
            made[f"medusa_heads.lm_heads.{head}.weight"] = rows
        return made

    ids = np.arange(32, 64)
    write_medusa(folder, "vLLM's", tensors([np.zeros((len(ids), hidden), np.float32)] * HEADS, ids), **config)
    with llm_of(f"medusa={folder}") as llm:
        answered = _answered(llm, requests)
    known = sorted({token for first, ids, _ in answered for token in ids[first + 2 :]})
    outputs = []
    for head in range(HEADS):
        x = np.concatenate([rows[first : len(ids) - 2 - head] for first, ids, rows in answered])
        came = [token for first, ids, _ in answered for token in ids[first + 2 + head :]]
        outputs.append(_solved(x, np.array(came)[:, None] == np.array(known)))
    return write_medusa(folder, "vLLM's", tensors(outputs, known), **config)


def _fit_own_layer(llm_of: Any, path: Path, requests: Sequence[Request], folder: Path) -> Path:
    """The model with a layer that gives its projection on, fitted to the output rows of what
    came.
    """
    tensors = load_file(path / "model.safetensors")
    with llm_of("mtp") as llm:
        answered = _answered(llm, requests)
    output, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    x = np.concatenate([rows[first : len(ids) - 2] for first, ids, rows in answered])
    nexts = np.concatenate([embedding[ids[first + 1 : -1]] for first, ids, _ in answered])
    wanted = np.concatenate([output[ids[first + 2 :]] for first, ids, _ in answered])

    def normed(values: Any, name: str) -> Any:
        weight = tensors[f"model.mtp_layers.0.{name}_layernorm.weight"]
        return values / np.sqrt(np.mean(values * values, axis=1, keepdims=True) + EPS) * weight

    both = np.concatenate([normed(x, "hidden"), normed(nexts, "token")], axis=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.mtp_layers.0.{name}.weight"][:] = 0.0
    tensors["model.mtp_layers.0.final_layernorm.weight"][:] = 1.0
    tensors["model.mtp_layers.0.input_proj.weight"] = _solved(both, wanted)
    return write_model(folder, tensors)
