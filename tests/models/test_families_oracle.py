"""The stored logits are what `transformers` computes today, and its own saved files load."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_golden_models import logits_of, transformers_model
from steps import Running
from tiny import CASES, IDS, golden

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("case", CASES)
def test_golden_and_saved_checkpoint(case: str, tmp_path: Path) -> None:
    model, _, _ = transformers_model(case)
    expected = logits_of(model, IDS)
    np.testing.assert_allclose(golden(case)[2], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    model.save_pretrained(tmp_path)
    actual = Running(tmp_path, context=32).step(IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
