"""Writes what the tests of `web/` compare with to a folder: tiny models, recordings of picoLM as
plain JSON, and what the Python port computes. Run by `make web-test`; needs the repository's Python
environment.

    PYTHONPATH=.:tests/picolm python web/test/prepare.py web/build/data
"""

from __future__ import annotations

import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import make_malformed
import make_models
import numpy as np

from picolm.model import KVCache, Model, model_forward
from picolm.sampler import Sampler
from picolm.tensor import Team

DATA = Path(__file__).resolve().parents[2] / "tests/data"
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "In 1969, the first humans"]
NEW_TOKENS = 16


def unpack(out: Path) -> None:
    """The recordings and vocabularies, without their compression."""
    for source in [*(DATA / "picolm").glob("*.json.xz"), *(DATA / "tokenizer").glob("*.xz")]:
        (out / source.stem).write_bytes(lzma.decompress(source.read_bytes()))


def port_logits(out: Path) -> None:
    """Logits of every tiny model in the port's `scalar` order, for its recorded ids."""
    found: dict[str, Any] = {}
    recorded = np.load(DATA / "picolm/spec.npz")
    for path in sorted((out / "models").glob("*.gguf")):
        if f"{path.stem}/ids" not in recorded:
            continue
        ids = recorded[f"{path.stem}/ids"].tolist()
        model = Model(str(path), team=Team(order="scalar"))
        found[f"{path.stem}/ids"] = np.asarray(ids, np.int32)
        found[f"{path.stem}/logits"] = model_forward(model, KVCache(model.config), ids, every=True)
    np.savez(out / "port.npz", **found)


def port_samples(out: Path) -> None:
    """Eight picks in a row of the port's sampler, for many settings."""
    recorded = np.load(DATA / "picolm/sampler.npz")
    cases = []
    for name in ("base", "ties", "masked", "flat", "one"):
        for temperature in (0.0, 0.3, 0.8, 1.0, 2.5):
            for top_p in (0.0, 0.5, 0.9, 1.0):
                for seed in (0, 1, 42, 2**64 - 1):
                    sampler = Sampler(temperature, top_p, seed)
                    picks = [sampler.sample(recorded[f"logits/{name}"].copy()) for _ in range(8)]
                    case = {
                        "logits": name,
                        "temperature": temperature,
                        "topP": top_p,
                        "seed": str(seed),
                        "picks": picks,
                    }
                    cases.append(case)
    (out / "samples.json").write_text(json.dumps(cases))


def port_answers(out: Path) -> None:
    """Greedy tokens of the default model by the port, if the model is there."""
    folder = Path(os.environ.get("MARTLET_TEST_MODELS") or "~/.cache/martlet/models").expanduser()
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    answers = []
    if path.exists():
        from picolm.tokenizer import Tokenizer

        model = Model(str(path), context=256)
        tokenizer = Tokenizer(model.file.meta, model.config.vocab_size)
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt.encode())
            cache, made = KVCache(model.config), []
            logits = model_forward(model, cache, ids)
            while len(made) < NEW_TOKENS:
                made.append(int(logits.argmax()))
                logits = model_forward(model, cache, made[-1:])
            answers.append({"prompt": prompt, "ids": ids, "made": made})
    (out / "answers.json").write_text(json.dumps(answers))


def main() -> None:
    """Everything."""
    out = Path(sys.argv[1])
    for name in ("models", "malformed"):
        (out / name).mkdir(parents=True, exist_ok=True)
    make_models.main(str(out / "models"))
    make_malformed.main(str(out / "malformed"))
    unpack(out)
    port_logits(out)
    port_samples(out)
    port_answers(out)


if __name__ == "__main__":
    main()
