"""The same numbers from three engines: picolm/ (NumPy), martlet's float32 reference, mini-picoLM
(Node).

    python -m bench.three_engines MODEL.gguf [MODEL.gguf …]

Node's part needs `npm ci` in web/.

picolm continues 3 prompts by 32 tokens. The reference, and the page's engine as it computes by
default and (`--exact`) in exact float32, then compute the logits of each of those steps; printed
are how many ids agree (of the prompt, of the best tokens) and the largest difference of a logit,
beside the largest logit. The reference needs memory for the model in float32.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import forward
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from picolm.model import KVCache, Model, model_forward, prefill
from picolm.tensor import Team
from picolm.tokenizer import Tokenizer

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of"]
STEPS = 32
PAGE = 32
WEB = Path(__file__).resolve().parents[1] / "web"


def port(path: str) -> dict[str, np.ndarray]:
    """Ids and logits by picolm: of each prompt its ids, the tokens made, and the logits that each
    was chosen by.
    """
    m = Model(path, 256, Team(2))
    found: dict[str, np.ndarray] = {}
    m.hold()
    tokenizer = Tokenizer(m.file.meta, m.config.vocab_size)
    for i, prompt in enumerate(PROMPTS):
        kv, ids = KVCache(m.config), tokenizer.encode(prompt.encode())
        logits = [prefill(m, kv, ids)]
        made = [int(logits[0].argmax())]
        while len(made) < STEPS:
            logits.append(model_forward(m, kv, made[-1:]))
            made.append(int(logits[-1].argmax()))
        found |= {
            f"{i}/ids": np.array(ids, np.int32),
            f"{i}/made": np.array(made, np.int32),
            f"{i}/logits": np.stack(logits),
        }
    return found


def against_reference(path: str, found: dict[str, np.ndarray]) -> None:
    """martlet's reference backend, from the same ids."""
    ops = ReferenceBackend()
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, ops, context=256)
    caches = [ops.kv_cache(8, PAGE, x.mixer.n_kv_heads, x.mixer.head_dim, "f32") for x in model.spec.layers]
    program = ops.capture(lambda: forward(ops, model, caches), StepLimits(256, 1, 256, 8))
    worst, agree = 0.0, 0
    for i in range(len(PROMPTS)):
        prompt, made = found[f"{i}/ids"], found[f"{i}/made"]
        ids = np.concatenate([prompt, made[:-1]]).astype(np.int32)
        positions = np.arange(ids.size, dtype=np.int32)
        bounds, table = np.array([0, ids.size], np.int32), np.arange(8, dtype=np.int32)[None]
        rows = positions[prompt.size - 1 :]
        logits = ops.download(program.run(StepInputs(ids, positions, positions, bounds, table, rows)))
        worst = max(worst, float(np.abs(logits - found[f"{i}/logits"]).max()))
        agree += int((logits.argmax(1) == made).sum())
    most = max(float(np.abs(found[f"{i}/logits"]).max()) for i in range(len(PROMPTS)))
    print(
        f"  reference: {agree} of {STEPS * len(PROMPTS)} best tokens; logits differ by {worst:.5f} at most (largest {most:.1f})"
    )


def main() -> None:
    """All models named."""
    exact = ["--exact"] if "--exact" in sys.argv else []
    for path in (a for a in sys.argv[1:] if a != "--exact"):
        print(Path(path).name, flush=True)
        found = port(path)
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/port.npz", **found)  # type: ignore[arg-type]
            against_reference(path, found)
            if (WEB / "node_modules").is_dir():
                subprocess.run(["node", "build.mjs", "--test"], cwd=WEB, check=True)
                subprocess.run(
                    ["node", "build/bench/numbers.mjs", str(Path(path).resolve()), f"{folder}/port.npz", *exact],
                    cwd=WEB,
                    check=True,
                )


if __name__ == "__main__":
    main()
