"""Greedy continuations on the CPU backend against the float32 reference: do they part only at near
ties?

    python bench/greedy.py MODEL.gguf [MODEL.gguf …]

The cpu backend continues 20 prompts by 32 tokens; the reference, exact float32 arithmetic on the
same weights, then computes the logits of each step. A step agrees if the reference's best token is
the one chosen; where it is not, the gap between the two tokens' logits says how near a tie it was.
Activations are bytes in the cpu backend, so a gap up to the error of that arithmetic
(docs/tuning.md) may fall either way. Needs memory for the model in float32 (Qwen-1.5B: 7 GB).
"""

from __future__ import annotations

import sys

import numpy as np

from martlet import LLM, SamplingParams
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import forward
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "In 1969, the first humans",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "The three primary colours are",
    "import numpy as np\n\ndef softmax(x):\n",
    "To make an omelette, first",
    "The chemical symbol for gold is",
    "Roses are red, violets are",
    "SELECT name, age FROM users WHERE",
    "The opposite of hot is",
    "A prime number is a number that",
    "Dear Sir or Madam,\n\nI am writing to",
    "The Pacific Ocean is",
    "1, 2, 3, 4, 5,",
    "for i in range(10):\n    print(",
    "William Shakespeare wrote",
    "The speed of light is approximately",
    "Photosynthesis is the process by which",
]
STEPS = 32
PAGE = 32


def compare(path: str) -> None:
    """Print the model's agreement, and the largest gap at which the two parted."""
    params = SamplingParams(temperature=0.0, max_tokens=STEPS)
    with LLM(path, max_context=256) as llm:
        outputs = llm.generate(PROMPTS, params)
    ops = ReferenceBackend()
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, ops, context=256)
    caches = [ops.kv_cache(8, PAGE, x.mixer.n_kv_heads, x.mixer.head_dim, "f32") for x in model.spec.layers]
    program = ops.capture(lambda: forward(ops, model, caches), StepLimits(256, 1, 256, 8))
    gaps: list[float] = []
    partings: list[int | None] = []
    for output in outputs:
        chosen = output.outputs[0].token_ids
        ids = np.array(output.prompt_token_ids + chosen[:-1], np.int32)
        positions = np.arange(ids.size, dtype=np.int32)
        rows = positions[len(output.prompt_token_ids) - 1 :]
        table = np.arange(8, dtype=np.int32)[None]
        bounds = np.array([0, ids.size], np.int32)
        logits = ops.download(program.run(StepInputs(ids, positions, positions, bounds, table, rows)))
        gaps += [float(row.max() - row[token]) for row, token in zip(logits, chosen, strict=True)]
        first = next((i for i, gap in enumerate(gaps[-len(chosen) :]) if gap > 0), None)
        partings.append(first)
    parted = [gap for gap in gaps if gap > 0]
    print(
        f"{path}: {len(gaps) - len(parted)} of {len(gaps)} steps agree, {partings.count(None)} of {len(partings)} whole texts;"
    )
    print(
        f"  gaps of the reference's logits where they part: largest {max(parted, default=0.0):.3f}, {sorted(parted)[-5:]}"
    )


if __name__ == "__main__":
    for model_path in sys.argv[1:]:
        compare(model_path)
