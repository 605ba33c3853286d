"""Files with a wrong value anywhere: they load and work, or fail with Martlet's own errors
(hypothesis).
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.errors import MartletError
from martlet.tokenizer.tokenizer import Tokenizer

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(-2, 12),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["gpt2", "llama", "default", "Isolated", "first", "(", "[a&&", "BPE", "Sequence", "▁", "<0x0A>"]),
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TEXTS = ("", "ab ba<s>\n", "é<0x0A>▁ 1")

SCORED = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "ab", "▁", "▁a"],
    "scores": [0.0, 0.0, 0.0, 0.0, -4.0, -5.0, -1.0, -6.0, -2.0],
    "token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "add_bos_token": True,
    "add_space_prefix": True,
}
BYTE_LEVEL = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "Ġ", "<|im_end|>"],
    "token_type": [1, 1, 1, 1, 3],
    "merges": ["a b"],
    "eos_token_id": 4,
    "eot_token_id": 4,
}


def use(tokenizer: Tokenizer) -> None:
    """Everything a server does with it."""
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text, parse_special=True)
        except MartletError:
            continue
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        tokenizer.decode(ids)
    for token in range(tokenizer.vocab_size):
        tokenizer.token_bytes(token)
    for token in (*tokenizer.eog_ids, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id):
        assert token is None or 0 <= token < tokenizer.vocab_size


@given(base=st.sampled_from([SCORED, BYTE_LEVEL]), data=st.data())
@settings(max_examples=400, deadline=None)
def test_metadata(base: dict[str, Any], data: st.DataObject) -> None:
    metadata = {f"tokenizer.ggml.{key}": copy.deepcopy(value) for key, value in base.items()}
    key = data.draw(st.sampled_from(sorted(metadata)))
    metadata[key] = changed(metadata[key], data)
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except MartletError:
        return
    use(tokenizer)


HF = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "NFC"}]},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
            {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False},
            {"type": "Punctuation", "behavior": "Contiguous"},
        ],
    },
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "▁": 3, "<0x0A>": 4, "<s>": 5, "<unk>": 6},
        "merges": [["a", "b"]],
        "byte_fallback": True,
        "unk_token": "<unk>",
    },
    "added_tokens": [{"id": 5, "content": "<s>", "special": True, "rstrip": True}, {"id": 7, "content": "<x>"}],
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
        "special_tokens": {"<s>": {"ids": [5]}},
    },
    "decoder": {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1}]},
}
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "<s>"},
    "add_bos_token": True,
    "added_tokens_decoder": {"8": {"content": "y"}},
}


def changed(value: Any, data: st.DataObject) -> Any:
    """`value` with something else at a random place in it."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(value) - 1))
        return [*value[:i], changed(value[i], data), *value[i + 1 :]]
    return data.draw(VALUE)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_hf_files(data: st.DataObject) -> None:
    tokenizer_json, config = copy.deepcopy(HF), copy.deepcopy(CONFIG)
    if data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(tokenizer_json)))
        tokenizer_json[key] = changed(tokenizer_json[key], data)
    else:
        key = data.draw(st.sampled_from(sorted(config)))
        config[key] = changed(config[key], data)
    try:
        tokenizer = Tokenizer.from_hf(tokenizer_json, config)
    except MartletError:
        return
    use(tokenizer)
