"""Write tests/data/models/*.npz: what `transformers` computes, in float32, for the tiny model of
each family.

Run from the repository's root with torch and transformers installed: python
tools/make_golden_models.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

from tiny import CASES, FOLDER, IDS, SIZES, weights

DROPPED = ("transformers_version", "dtype", "architectures", "id2label", "label2id", "_name_or_path")


def transformers_model(case: str) -> tuple[Any, dict[str, Any], dict[str, list[int]]]:
    """The library's model with the case's weights, its config as a dictionary, and its tensors'
    shapes.
    """
    stem, _, extra = CASES[case]
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **extra})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")(config).float().eval()
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    with torch.no_grad():
        for name, values in weights(case, shapes).items():
            state[name].copy_(torch.from_numpy(values))
    return model, {key: value for key, value in config.to_dict().items() if key not in DROPPED}, shapes


def logits_of(model: Any, ids: list[int]) -> Any:
    """The model's logits, [T, V]."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def main() -> None:
    """Write every case."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        model, config, shapes = transformers_model(case)
        description = json.dumps({"config": config, "shapes": shapes})
        np.savez_compressed(FOLDER / f"{case}.npz", description=description, logits=logits_of(model, IDS))


if __name__ == "__main__":
    main()
