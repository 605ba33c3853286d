"""Small random adapters as PEFT folders and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from martlet.models.tensors import lora_shapes
from martlet.spec import ModelSpec

F32 = NDArray[np.float32]
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def random_updates(
    spec: ModelSpec, rank: int, seed: int, products: tuple[str, ...] = tuple(HF_NAMES), size: float = 0.3
) -> dict[str, tuple[F32, F32]]:
    """A and B, without their scale, of these products of every layer that has them."""
    rng = np.random.default_rng(seed)
    updates = {}
    for i, layer in enumerate(spec.layers):
        for product in products:
            if product not in lora_shapes(spec, layer):
                continue  # a mixture's experts have no updates
            n, k = lora_shapes(spec, layer)[product]
            a, b = rng.standard_normal((rank, k)) / k**0.5, rng.standard_normal((n, rank)) * size
            updates[f"blk.{i}.{product}"] = a.astype(np.float32), b.astype(np.float32)
    return updates


def write_peft(folder: Path, updates: dict[str, tuple[F32, F32]], alpha: float = 16, **settings: Any) -> Path:
    """A folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in updates.items():
        _, layer, product = name.split(".")
        module = f"base_model.model.model.layers.{layer}.{HF_NAMES[product]}"
        tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": len(a), "lora_alpha": alpha, "bias": "none", "use_dora": False, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_gguf_adapter(path: Path, updates: dict[str, tuple[F32, F32]], alpha: float = 16, arch: str = "llama") -> Path:
    """A file as llama.cpp's convert_lora_to_gguf.py makes it; rows of q and k have to be in the
    file's order.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in updates.items():
        writer.add_tensor(f"{name}.weight.lora_a", a)
        writer.add_tensor(f"{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
