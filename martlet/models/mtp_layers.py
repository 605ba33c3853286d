"""Layers for multi-token prediction that a model brings itself, as a head (read `eagle_head.py` first, which runs it).

    feature    what the model's final norm gives at position p                              [C]
    both     = [norm(feature), norm(embedding of token p + 1)]                              [2C]
    x        = project(both);   x += attention(norm(x)) + ffn(…), a layer as the model's own
    logits   = the model's output rows of norm(x): of token p + 2

norm(x) then stands for the feature that p + 1 will have. At position 0 the embedding is zero. Source: MiMo (arXiv:2505.07608),
as vLLM runs it; the tensors are model.mtp_layers.0.* of the model's safetensors. GGUF files do not have them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from martlet.errors import FormatError, RequestError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.eagle_head import HeadFile
from martlet.quant.table import RawTensor
from martlet.spec import ModelSpec

__all__ = ["PREFIX", "open_own_head"]

PREFIX = "model.mtp_layers."
NAMES = {  # as `eagle_head.py` calls them
    "input_proj.weight": "fc.weight",
    "token_layernorm.weight": "token_norm.weight",
    "hidden_layernorm.weight": "midlayer.hidden_norm.weight",
    "final_layernorm.weight": "norm.weight",
}


def open_own_head(checkpoint: Checkpoint, spec: ModelSpec) -> HeadFile:
    """The model's own layer; RequestError if it has none, FormatError or UnsupportedError for one that does not fit."""
    found = {name.removeprefix(PREFIX): raw for name, raw in checkpoint.tensors.items() if name.startswith(PREFIX)}
    if not found:
        raise RequestError(
            f"{checkpoint.path} has no layers for multi-token prediction (its family is {spec.family}): choose another draft.",
            param="draft",
        )
    others = [name for name in found if not name.startswith("0.")]
    if others:
        raise UnsupportedError(f"{checkpoint.path} holds {PREFIX}{others[0]:.120}: 1 such layer is supported")
    tensors = {NAMES.get(name[2:], f"midlayer.{name[2:]}"): raw for name, raw in found.items()}
    own = replace(spec, layers=spec.layers[-1:])
    _check(checkpoint, tensors, own)
    return HeadFile(checkpoint, own, (len(spec.layers),), np.arange(spec.vocab), tensors)


def _check(checkpoint: Checkpoint, tensors: dict[str, RawTensor], own: ModelSpec) -> None:
    """All tensors of a layer, of the right shapes, and no others."""
    c, mixer, f = own.hidden, own.layers[0].mixer, own.layers[0].ffn.ffn_hidden
    q, kv = mixer.n_heads * mixer.head_dim, mixer.n_kv_heads * mixer.head_dim
    expected = {
        **dict.fromkeys(("token_norm", "midlayer.hidden_norm", "norm"), (c,)),
        **dict.fromkeys(("midlayer.input_layernorm", "midlayer.post_attention_layernorm"), (c,)),
        "fc": (c, 2 * c),
        "midlayer.self_attn.q_proj": (q, c),
        "midlayer.self_attn.k_proj": (kv, c),
        "midlayer.self_attn.v_proj": (kv, c),
        "midlayer.self_attn.o_proj": (c, q),
        "midlayer.mlp.gate_proj": (f, c),
        "midlayer.mlp.up_proj": (f, c),
        "midlayer.mlp.down_proj": (c, f),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in expected.items()}
    if mixer.bias:
        shapes |= {f"midlayer.self_attn.{part}_proj.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv))}
    old = {new: name for name, new in NAMES.items()}
    for name, shape in shapes.items():
        theirs = f"{PREFIX}0.{old.get(name, name.removeprefix('midlayer.'))}"
        if name not in tensors:
            raise FormatError(checkpoint.path, f"the tensor {theirs} is missing")
        if tensors[name].shape != shape:
            sizes = ("x".join(map(str, s)) for s in (tensors[name].shape, shape))
            raise FormatError(checkpoint.path, "{} has the shape {}, expected {}".format(theirs, *sizes))
    extra = sorted(tensors.keys() - shapes.keys())
    if extra:
        name = extra[0].removeprefix("midlayer.")
        raise UnsupportedError(f"{checkpoint.path} holds {PREFIX}0.{name:.120}, which is of no use here")
