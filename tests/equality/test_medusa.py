"""Medusa heads: guesses against their arithmetic in NumPy, both layouts of files, answers
unchanged, refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_draft_head import watched, with_guesses
from tiny_head import followed

from martlet import LLM, SamplingParams, toy
from martlet.errors import FormatError, MartletError, UnsupportedError
from martlet.models.eagle_head import CODES, OUTPUT_CODES
from martlet.quant.encode import encode
from martlet.quant.ggml import decode
from martlet.quant.table import BlockType, RawTensor
from martlet.toy import HIDDEN as C
from martlet.toy import VOCAB as V

HEADS, BLOCKS = 3, 2
NAMES = {  # of a weight and a bias of a block, and of an output
    "first": ("{head}.{block}.linear.{kind}", "{head}.2.weight"),
    "vLLM's": ("medusa_heads.blocks.{head}.layers.{block}.{kind}", "medusa_heads.lm_heads.{head}.weight"),
}
CONFIGS = {
    "first": {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS},
    "vLLM's": {"num_heads": HEADS, "num_hidden_layers": BLOCKS, "hidden_size": C},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def tensors_of(layout: str, rows: int = V) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    made: dict[str, Any] = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            name = NAMES[layout][0]
            made[name.format(head=head, block=block, kind="weight")] = rng.standard_normal((C, C)) * 0.2
            made[name.format(head=head, block=block, kind="bias")] = rng.standard_normal(C) * 0.2
        made[NAMES[layout][1].format(head=head)] = rng.standard_normal((rows, C))
    return {name: values.astype(np.float32) for name, values in made.items()}


def write(folder: Path, layout: str, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[layout], **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def packed(values: Any, kind: BlockType) -> Any:
    return decode(RawTensor("", values.shape, kind, encode(values, kind).reshape(-1)))


def by_hand(tensors: dict[str, Any], layout: str, feature: Any) -> list[Any]:
    """Each head's logits (arXiv:2401.10774, section 2.1.1)."""
    found = []
    for head in range(HEADS):
        x = feature.astype(np.float64)
        for block in range(BLOCKS):
            weight, bias = (
                tensors[NAMES[layout][0].format(head=head, block=block, kind=k)] for k in ("weight", "bias")
            )
            y = packed(weight, CODES) @ x + bias
            x = x + y / (1 + np.exp(-y))
        found.append(packed(tensors[NAMES[layout][1].format(head=head)], OUTPUT_CODES) @ x)
    return found


@pytest.mark.parametrize("layout", NAMES)
def test_guesses_are_those_of_the_arithmetic(tiny: Path, tmp_path: Path, layout: str) -> None:
    tensors, ids_of, more = tensors_of(layout), np.arange(V), {}
    if layout == "vLLM's":
        ids_of = np.arange(200, 100, -1)
        tensors = tensors_of(layout, len(ids_of))
        more = {"token_map": ids_of}
    folder = write(tmp_path, layout, {**tensors, **more})
    options: dict[str, Any] = {"backend": "reference", "threads": 1, "prefix_cache": False}
    with LLM(str(tiny), draft=f"medusa={folder}", **options) as llm:
        made, features = watched(llm), followed(llm)
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=25, ignore_eos=True)
        plain, guessed = (llm.generate(["some words", "ab"], with_guesses(params, n)) for n in (0, 2))
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in guessed]
    assert len(made) > 30
    for seq, ids, guesses in made:
        logits = by_hand(tensors, layout, features[seq][len(ids) - 2][0])
        assert len(guesses) == 2 or len(ids) >= 25 + len("ab") - 2, "fewer only where the answer ends"
        assert guesses == tuple(int(ids_of[row.argmax()]) for row in logits[: len(guesses)])


def test_answers_are_those_without(tiny: Path, tmp_path: Path) -> None:
    """With the model's own output rows, on the processor's kernels."""
    tensors = {name: values for name, values in tensors_of("first").items() if "linear" in name}
    folder = write(tmp_path, "first", tensors)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, logprobs=2, n=2)
    found = []
    for draft in ("off", f"medusa={folder}"):
        with LLM(str(tiny), draft=draft, threads=1, max_context=200, max_seqs=4) as llm:
            outputs = llm.generate(["The harbour", "ab"], params if draft == "off" else with_guesses(params, 3))
            found.append([(c.token_ids, repr(c.logprobs)) for o in outputs for c in o.outputs])
            assert (llm.engine.totals.speculation.n_drafted > 100) == (draft != "off")
    assert found[0] == found[1]


def without(name: str) -> dict[str, Any]:
    found = tensors_of("first")
    del found[name]
    return found


NAN = tensors_of("first") | {"1.0.linear.bias": np.full(C, np.nan, np.float32)}
FILES: list[tuple[dict[str, Any], dict[str, Any], type[MartletError], str]] = [
    (tensors_of("first"), {"medusa_num_heads": 4}, FormatError, "head 3, block 0 is missing"),
    (tensors_of("first"), {"medusa_num_heads": 2}, FormatError, "block 0 of head 2"),
    (tensors_of("first"), {"medusa_num_heads": 0}, FormatError, "has 0 Medusa heads"),
    (tensors_of("first"), {"medusa_num_layers": "x"}, FormatError, "blocks a head"),
    (tensors_of("first", 100), {}, FormatError, "output of head 0 has the shape 100x64, expected 258x64"),
    (without("2.2.weight"), {}, FormatError, "outputs of 2 heads out of 3"),
    (without("1.1.linear.weight"), {}, FormatError, "head 1, block 1 is missing"),
    (tensors_of("first") | {"3.9.weight": np.zeros((2, 2), np.float32)}, {}, UnsupportedError, "3.9.weight"),
    (tensors_of("first") | {"token_map": np.array([1, 1])}, {}, FormatError, "token_map names"),
    (NAN, {}, FormatError, "values that are not finite"),
]


@pytest.mark.parametrize(("tensors", "config", "error", "says"), FILES, ids=[case[3][:30] for case in FILES])
def test_a_file_that_does_not_fit_is_refused(
    tiny: Path, tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], error: type[MartletError], says: str
) -> None:
    folder = write(tmp_path, "first", tensors, **config)
    with pytest.raises(error, match=says):
        LLM(str(tiny), draft=f"medusa={folder}", backend="reference", threads=1)
