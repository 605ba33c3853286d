"""Every family's logits against `transformers` in float32, from safetensors and from GGUF (fault QNT-05 among them)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from steps import Running
from tiny import CASES, NO_GGUF, V, logits_of, make, write_gguf

pytestmark = pytest.mark.oracle
IDS = [int(i) for i in np.random.default_rng(7).integers(3, V, 30)]


@pytest.mark.parametrize("case", CASES)
def test_logits_from_both_formats(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path / "hf")
    expected = logits_of(model, IDS)
    assert np.ptp(expected) > 2  # else anything would agree
    bound = 2e-4 * np.abs(expected).max()
    found = Running(tmp_path / "hf", context=32).step(IDS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    if case not in NO_GGUF:
        write_gguf(model, case, tmp_path / "model.gguf")
        found = Running(tmp_path / "model.gguf", context=32).step(IDS)
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def test_longrope_takes_the_long_factors_for_a_long_context(tmp_path: Path) -> None:
    model = make("phi3-longrope", tmp_path / "hf")
    ids = (IDS * 2)[:40]  # beyond the 32 positions of the first training
    expected = logits_of(model, ids)
    write_gguf(model, "phi3-longrope", tmp_path / "model.gguf")
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        found = Running(path, context=64).step(ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
        short = Running(path, context=32).step(ids)
        assert np.abs(short - expected).max() > 0.05
