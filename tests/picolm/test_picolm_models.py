"""Real models, against independent engines: float32 transformers, llama.cpp, the C; and the
snippets of docs/picolm.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import DATA, notes, same_bits

from picolm.cli import generate
from picolm.model import KVCache, Model, model_forward, prefill
from picolm.sampler import Sampler
from picolm.tensor import Team

CONTINUATIONS = json.loads((DATA.parent / "models/greedy.json").read_text())


def agreement(m: Model, case: dict[str, Any]) -> np.ndarray:
    """For each token of a continuation: by how much it is the best (negative: another one is)."""
    ids = case["prompt_ids"] + case["ids"][:-1]
    logits = model_forward(m, KVCache(m.config), ids, every=True)[len(case["prompt_ids"]) - 1 :]
    chosen = logits[np.arange(len(case["ids"])), case["ids"]].copy()
    logits[np.arange(len(case["ids"])), case["ids"]] = -np.inf
    return chosen - logits.max(1)


@pytest.mark.model
def test_smollm2_against_float32(smollm2_path: Path) -> None:
    """The default model, Q4_1 and byte-level BPE: every token of three continuations."""
    m = Model(str(smollm2_path), team=Team(2))
    for case in CONTINUATIONS["smollm2"]["continuations"]:
        assert (agreement(m, case) > 0).all()


@pytest.mark.large
def test_gemma_against_llama_cpp(gemma3_path: Path) -> None:
    """llama.cpp's activations have 8 bits, so that near ties may fall differently."""
    m = Model(str(gemma3_path), team=Team(2))
    for case in CONTINUATIONS["gemma3"]["continuations"]:
        assert (agreement(m, case) > -0.5).all()


@pytest.mark.large
def test_qwen_knows_quicksort(qwen_path: Path) -> None:
    """Qwen2's shape: biases, RoPE on halves; the continuation is llama.cpp's."""
    m = Model(str(qwen_path), team=Team(2), stream=True)
    case = {
        "prompt_ids": [785, 6722, 315, 9625, 374],
        "ids": [12095, 13, 12095, 374, 279],
    }  # The capital of France is Paris. Paris is the
    assert (agreement(m, case) > -0.5).all()


@pytest.mark.large
@pytest.mark.parametrize("weights", ["Q8_0", "Q4_0"])
def test_smollm2_as_the_c_computes_it(smollm2_path: Path, weights: str) -> None:
    """The C's own tokens, in its order of sums, from its own prompt ids and from the right ones.
    The files are made by llama-quantize (see tests/data/picolm/README.md) and lie beside the
    default model.
    """
    path = smollm2_path.with_name(f"SmolLM2-135M-Instruct.{weights}.gguf")
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != notes("smollm2")["sha256"][weights]:
        pytest.skip(f"{path} is not there, or not the file of the recording")
    m = Model(str(path), 128, Team(2, "sse"))
    for run in notes("smollm2")["runs"]:
        if run["weights"] == weights:
            for prompt, ids in (
                ("picolm_prompt_ids", "picolm_greedy_ids"),
                ("right_prompt_ids", "picolm_greedy_ids_from_right_ids"),
            ):
                ours = list(generate(m, KVCache(m.config), frozenset({2}), run[prompt], 16, Sampler(0, 1, 1), None))
                assert ours == run[ids]


SNIPPETS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/picolm.md").read_text(encoding="utf-8"), re.S
)


def greedy(m: Model, prompt: list[int], n: int) -> list[int]:
    return list(generate(m, KVCache(m.config), frozenset({2}), prompt, n, Sampler(0, 1, 1), None))


def snippet(name: str) -> Any:
    scope: dict[str, Any] = {"model_forward": model_forward, "prefill": prefill, "KVCache": KVCache}
    exec(next(text for text in SNIPPETS if f"def {name}(" in text), scope)
    return scope[name]


def test_speculation_as_the_page_shows_it(tiny: Path) -> None:
    """Whatever is drafted, the tokens are those of plain greedy decoding; right drafts come through
    in one pass.
    """
    m, speculate = Model(str(tiny / "q8_0.gguf"), team=Team(1, "sse")), snippet("speculate")
    prompt = [1, 345, 341, 293]
    right = greedy(m, prompt, 12)
    for draft_of in (
        lambda done: right[len(done) : len(done) + 3],
        lambda done: [5, 6],
        lambda done: [right[len(done)], 7],
    ):
        kv, out, passes = KVCache(m.config), [], 0
        out.append(int(prefill(m, kv, prompt).argmax()))
        while len(out) < 8:
            out += speculate(m, kv, out[-1], draft_of(out))
            passes += 1
        assert out[:8] == right[:8]
        assert kv.tokens == prompt + out[:-1]
        assert passes == (2 if draft_of([]) == right[:3] else 4 if draft_of([]) == [right[0], 7] else 7)


def test_batching_as_the_page_shows_it(tiny: Path) -> None:
    """Sequences that join and leave get the tokens that they get alone."""
    m, step = Model(str(tiny / "q8_0.gguf"), team=Team(1, "sse")), snippet("step")
    prompts = [[1, 345, 341, 293], [1, 348], [1, 260, 261, 300, 301]]
    waiting, sequences = [list(p) for p in prompts], []
    for _ in range(6):
        sequences = step(m, sequences, waiting, room=2)
        if len(sequences) == 2 and len(sequences[0][1]) == 4:
            finished = sequences.pop(0)
            assert finished[1] == greedy(m, prompts[0], 4)
    assert [out for _, out in sequences] == [greedy(m, prompts[1], 7), greedy(m, prompts[2], 4)]


def test_chunks_are_exact_in_the_cs_order(tiny: Path) -> None:
    """A prompt in one pass, in two, or token by token: the same bits, in the exact orders."""
    m = Model(str(tiny / "mix_q4km.gguf"), team=Team(2, "scalar"))
    prompt = list(range(300, 318))
    whole, split = KVCache(m.config), KVCache(m.config)
    model_forward(m, split, prompt[:7])
    assert same_bits(model_forward(m, whole, prompt), model_forward(m, split, prompt[7:]))
    assert same_bits(whole.keys[:, :18], split.keys[:, :18])
