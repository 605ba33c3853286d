"""A tokenizer from a Hugging Face directory: tokenizer.json and tokenizer_config.json
(`from_gguf.py` is for GGUF).

tokenizer.json spells the pipeline out: `normalizer`, `pre_tokenizer`, `model`, `post_processor`
(what goes around a text), `decoder`, `added_tokens`. tokenizer_config.json gives tokens their
roles. The meaning is that of the `tokenizers` library.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from martlet.errors import FormatError, UnsupportedError
from martlet.tokenizer.encoder import TextEncoder, byte_level_words, byte_tokens, char_words, missing_bytes
from martlet.tokenizer.from_gguf import Tables
from martlet.tokenizer.normalize import normalizer
from martlet.tokenizer.presplit import PreSplit, metaspace_scheme, pre_split
from martlet.tokenizer.split import SPACE, isolate, pipeline, pre_tokenizer, word_splitter
from martlet.tokenizer.vocab import AddedToken, SpecialIds, TokenType, Vocab, build_vocab, checked_id, end_of_generation

# Between the two symbols of a merge: the first text that no symbol holds.
JOINTS = (" ", "\0", "\uffff")


def tables_from_hf(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], *, pre: str | None, eos_ids: Iterable[int], source: str
) -> Tables:
    """Read a tokenizer.

    FormatError or UnsupportedError, with `source` as the file, if it is unusable.
    """
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), (Mapping, list)):
        raise FormatError(source, "there is no model with a vocab in it; expected a tokenizer.json of Hugging Face.")
    model_type = model.get("type", "BPE" if "merges" in model else "?")
    if model_type != "BPE":
        raise UnsupportedError(f"Tokenizer model {model_type!r} of tokenizer.json is not supported", ["BPE"])
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UnsupportedError(f"BPE with {key} = {model[key]!r} is not supported")
    try:
        return _tables(tokenizer, model, config, pre, eos_ids, source)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(
            source, f"an object in it has not the expected form ({type(error).__name__}: {error}). Get another file."
        ) from error


def _tables(
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    pre: str | None,
    eos_ids: Iterable[int],
    source: str,
) -> Tables:
    fallback = bool(model.get("byte_fallback"))
    vocab = _vocab(tokenizer, model, config, source)
    bytes_ = byte_tokens(vocab.ids) if fallback else (None,) * 256
    special = _special_ids(vocab, model, config, eos_ids)
    before, after = _around(tokenizer.get("post_processor"), vocab, special, config)
    vocab.added = _with_control(vocab)
    control = {token.text for token in vocab.added if token.special}
    vocab.ids = {text: token for text, token in model["vocab"].items() if text not in control}
    steps = pre_split(tokenizer.get("pre_tokenizer"))
    if pre is not None:
        steps = PreSplit([isolate(pattern) for pattern in pre_tokenizer(pre).patterns], byte_level=True)
    unk = special.unk if model.get("unk_token") is not None else None
    encoder = _encoder(tokenizer, model, vocab, steps, bytes_, unk)
    return Tables(
        name="BPE",
        pre=pre,
        vocab=vocab,
        encoder=encoder,
        special=special,
        before=before,
        after=after,
        byte_level=_is_byte_level(tokenizer, steps),
        byte_fallback=fallback,
        strips_space=_strips_space(tokenizer.get("decoder")),
    )


def _vocab(tokenizer: Mapping[str, Any], model: Mapping[str, Any], config: Mapping[str, Any], source: str) -> Vocab:
    """The model's vocabulary with the added tokens, which may lie beyond it."""
    ids: dict[str, int] = dict(model["vocab"])
    added = {token.id: token for token in _added_tokens(tokenizer, config)}
    size = 1 + max([*ids.values(), *added], default=-1)
    if size > 2 * (len(ids) + len(added)) + 65536 or min([*ids.values(), *added], default=0) < 0:
        raise FormatError(source, f"{len(ids):,} tokens have ids up to {size - 1:,}; expected ids without great gaps.")
    texts: list[str] = [""] * size
    types = bytearray([TokenType.UNUSED]) * size
    for text, token in ids.items():
        texts[token] = text
        types[token] = TokenType.NORMAL
    if model.get("byte_fallback"):
        for known in byte_tokens(ids):
            if known is not None:
                types[known] = TokenType.BYTE
    for token, entry in added.items():
        texts[token] = entry.text
        types[token] = TokenType.CONTROL if entry.special else TokenType.USER_DEFINED
    vocab = build_vocab(texts, bytes(types), source=source)
    vocab.ids = ids | {entry.text: entry.id for entry in added.values()}
    vocab.added = tuple(added.values())
    vocab.warnings.clear()  # empty texts of ids in a gap are no doubles
    return vocab


def _added_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[AddedToken]:
    """The added tokens of tokenizer.json, and the tokens that only tokenizer_config.json has."""
    entries = {int(entry["id"]): entry for entry in tokenizer.get("added_tokens") or ()}
    for token, entry in (config.get("added_tokens_decoder") or {}).items():
        entries.setdefault(int(token), entry)
    for token, entry in entries.items():
        flags = {
            name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
        }
        if flags["special"]:
            flags["normalized"] = False  # found in the raw text, where literal spans are known
        yield AddedToken(token, str(entry["content"]), **flags)


def _with_control(vocab: Vocab) -> tuple[AddedToken, ...]:
    """The added tokens with every control token among them, as special."""
    added = {token.id: token for token in vocab.added}
    for token in vocab.of_type(TokenType.CONTROL):
        known = added.get(token, AddedToken(token, vocab.texts[token], special=True))
        added[token] = replace(known, special=True, normalized=False)
    return tuple(added.values())


def _special_ids(
    vocab: Vocab, model: Mapping[str, Any], config: Mapping[str, Any], eos_ids: Iterable[int]
) -> SpecialIds:
    def role(name: str) -> int | None:
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if text is None:
            return None
        if text not in vocab.ids:
            vocab.warnings.append(f"{name} is {text!r}, which is no token of the vocabulary; it is ignored.")
        return vocab.ids.get(text)

    unk = model.get("unk_token")
    bos, eos, pad, unknown = role("bos_token"), role("eos_token"), role("pad_token"), role("unk_token")
    declared = [checked_id(token, "eos_token_id", vocab) for token in eos_ids]
    ends = end_of_generation(vocab, (eos, *declared))
    return SpecialIds(bos, eos, pad, vocab.ids.get(unk) if unk is not None else unknown, ends)


def _around(
    spec: Mapping[str, Any] | None, vocab: Vocab, special: SpecialIds, config: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a text; an explicit setting in tokenizer_config.json wins."""
    before, after = _post_processed(spec)
    if any(not 0 <= token < len(vocab.texts) for token in (*before, *after)):
        raise ValueError("the post-processor adds an id outside the vocabulary")
    for key, token, where in (("add_bos_token", special.bos, "before"), ("add_eos_token", special.eos, "after")):
        wanted = config.get(key)
        if wanted is None or token is None:
            continue
        if where == "before":
            rest = tuple(known for known in before if known != token)
            before = (token, *rest) if wanted else rest
        else:
            rest = tuple(known for known in after if known != token)
            after = (*rest, token) if wanted else rest
    return before, after


def _post_processed(spec: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if spec is None:
        return (), ()
    processor = spec.get("type")
    if processor == "ByteLevel":
        return (), ()
    if processor == "Sequence":
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        for step in spec["processors"]:
            left, right = _post_processed(step)
            before, after = left + before, after + right
        return before, after
    if processor == "TemplateProcessing":
        sides: tuple[list[int], list[int]] = ([], [])
        side = 0
        for item in spec["single"]:
            if "Sequence" in item:
                side = 1
            else:
                sides[side].extend(map(int, spec["special_tokens"][item["SpecialToken"]["id"]]["ids"]))
        return tuple(sides[0]), tuple(sides[1])
    if processor in ("RobertaProcessing", "BertProcessing"):
        return (int(spec["cls"][1]),), (int(spec["sep"][1]),)
    raise UnsupportedError(
        f"Post-processor {processor!r} of tokenizer.json is not supported",
        ["BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"],
    )


def _merge_ranks(merges: Sequence[Any]) -> tuple[dict[str, int], str]:
    """Ranks by left + joint + right, and the joint.

    Merges are "left right" or, in newer files, [left, right].
    """
    lines: Sequence[str] = merges
    joint = " "
    if merges and not isinstance(merges[0], str):
        symbols = "\n".join([left + "\n" + right for left, right in merges])
        joint = next(joint for joint in JOINTS if joint not in symbols)
        lines = [left + joint + right for left, right in merges]
    return dict(zip(reversed(lines), range(len(lines) - 1, -1, -1), strict=True)), joint


def _encoder(
    tokenizer: Mapping[str, Any],
    model: Mapping[str, Any],
    vocab: Vocab,
    steps: PreSplit,
    bytes_: tuple[int | None, ...],
    unk: int | None,
) -> TextEncoder:
    ranks, joint = _merge_ranks(model.get("merges") or ())
    whole_words = bool(model.get("ignore_merges"))
    normalize = normalizer(tokenizer.get("normalizer"))
    if _is_byte_level(tokenizer, steps):
        vocab.note(missing_bytes(vocab.ids) if unk is None else None)
        mapped = steps.mapped or not steps.byte_level
        words = byte_level_words(vocab.ids, ranks, joint=joint, whole_words=whole_words, unk=unk, mapped=mapped)
    else:
        if SPACE in vocab.ids:
            steps.steps.append(word_splitter(model["vocab"]))
        fuse = bool(model.get("fuse_unk"))
        words = char_words(
            vocab.ids, ranks, joint=joint, bytes_=bytes_, unk=unk, fuse_unk=fuse, whole_words=whole_words
        )
    return TextEncoder(normalize, pipeline(steps.steps), words, steps.lead)


def _is_byte_level(tokenizer: Mapping[str, Any], steps: PreSplit) -> bool:
    return steps.byte_level or "ByteLevel" in _types(tokenizer.get("normalizer"), "normalizers")


def _types(spec: Mapping[str, Any] | None, children: str) -> list[str]:
    if spec is None:
        return []
    return [str(spec.get("type")), *(name for child in spec.get(children) or () for name in _types(child, children))]


def _strips_space(decoder: Mapping[str, Any] | None) -> bool:
    """Whether decoding drops one space at the start of a text."""
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        return any(_strips_space(step) for step in decoder["decoders"])
    if decoder.get("type") == "Metaspace":
        return metaspace_scheme(decoder) != "never"
    return bool(decoder.get("type") == "Strip" and decoder.get("content") == " " and int(decoder.get("start", 0)))
