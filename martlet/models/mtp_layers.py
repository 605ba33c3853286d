"""A model's own layer for multi-token prediction, as a draft head (`eagle_head.py` runs it).

    feature    the output of the model's final norm at position p                           [C]
    both     = [norm(feature), norm(embedding of token p + 1)]                              [2C]
    x        = project(both);   x += attention(norm(x)) + ffn(…), a layer as the model's own
    logits   = the model's output rows of norm(x): of token p + 2

norm(x) then stands for the feature that p + 1 will have. At position 0 the embedding is zero.
Source: MiMo (arXiv:2505.07608), as vLLM runs it; the tensors are model.mtp_layers.0.* of the
model's safetensors. GGUF files do not have them.
"""

from dataclasses import replace

import numpy as np

from martlet.errors import RequestError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.eagle_head import HeadFile
from martlet.models.families import FAMILIES
from martlet.models.tensors import canonical_name, check_tensors, layer_shapes, published_names
from martlet.spec import ModelSpec

NAMES = {  # those of `HeadFile`
    "input_proj.weight": "fc.weight",
    "token_layernorm.weight": "token_norm.weight",
    "hidden_layernorm.weight": "midlayer.hidden_norm.weight",
    "final_layernorm.weight": "output_norm.weight",
}


def open_own_head(checkpoint: Checkpoint, spec: ModelSpec) -> HeadFile:
    """The model's own layer.

    Raises RequestError if it has none, FormatError or UnsupportedError if the layer does not fit.
    """
    path, prefix, c = checkpoint.path, FAMILIES[spec.family].mtp_prefix, spec.hidden
    own = {name: raw for name, raw in checkpoint.tensors.items() if prefix is not None and name.startswith(prefix)}
    if not own:
        raise RequestError(
            f"{path} has no layers for multi-token prediction (its family is {spec.family}): choose another draft.",
            param="draft",
        )
    first = f"{prefix}0."
    others = [name for name in own if not name.startswith(first)]
    if others:
        raise UnsupportedError(f"{path} holds {others[0]:.120}: 1 such layer is supported")
    short = {name.removeprefix(first): raw for name, raw in own.items()}
    tensors = {NAMES.get(name) or canonical_name(f"layers.0.{name}", {}) or name: raw for name, raw in short.items()}
    layer = spec.layers[-1]
    expected = {
        "fc.weight": (c, 2 * c),
        **dict.fromkeys(("token_norm.weight", "midlayer.hidden_norm.weight", "output_norm.weight"), (c,)),
        **layer_shapes(spec, layer, "blk.0.", tensors),
    }
    published = published_names(first) | {ours: first + theirs for theirs, ours in NAMES.items()}
    check_tensors(path, tensors, expected, "multi-token prediction", published)
    extra = sorted(tensors.keys() - expected.keys())
    if extra:
        raise UnsupportedError(f"{path} holds {tensors[extra[0]].name:.120}, which is of no use here")
    return HeadFile(checkpoint, replace(spec, layers=(layer,)), (len(spec.layers),), np.arange(spec.vocab), tensors)
