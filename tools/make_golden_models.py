"""Write tests/data/models/*.npz: what `transformers` computes, in float32, for the tiny model of
each family.

Run from the repository's root with torch and transformers installed:

    python tools/make_golden_models.py [CASE …]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

from tiny import CASES, FOLDER, IDS, SIZES, weights, write_hf

DROPPED = ("transformers_version", "dtype", "architectures", "id2label", "label2id", "_name_or_path")


def transformers_model(case: str) -> tuple[Any, dict[str, Any], dict[str, list[int]]]:
    """The library's model with the case's weights, its config as a dictionary, and the shapes of
    the tensors under the names that files have.
    """
    stem, _, extra = CASES[case]
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **extra})
    kind = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")
    with tempfile.TemporaryDirectory() as folder:
        kind(config).float().save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    settings = {key: value for key, value in config.to_dict().items() if key not in DROPPED}
    with tempfile.TemporaryDirectory() as folder:
        path = write_hf(settings, weights(case, shapes), Path(folder) / "model")
        model = kind.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    return model, settings, shapes


def logits_of(model: Any, ids: list[int]) -> Any:
    """The model's logits, [T, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def main() -> None:
    """Write every case, or those that the command line names."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in sys.argv[1:] or CASES:
        model, config, shapes = transformers_model(case)
        description = json.dumps({"config": config, "shapes": shapes})
        np.savez_compressed(FOLDER / f"{case}.npz", description=description, logits=logits_of(model, IDS))


if __name__ == "__main__":
    main()
