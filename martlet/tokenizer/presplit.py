"""The pre-tokenizers of a tokenizer.json, as steps of a pipeline (read `from_json.py` next).

A step cuts a piece at the matches of a pattern. The `behavior` says what becomes of a match: it is
dropped, a piece of its own, or joined to a neighbour. `split.py` has GGUF's pre-tokenizers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from martlet.errors import UnsupportedError
from martlet.tokenizer.bpe import byte_level
from martlet.tokenizer.split import FILE_TIMEOUT_S, GPT2, SPACE, Step, file_pattern, isolate, literal

# What the `tokenizers` library calls punctuation: Unicode's P, and the other marks of ASCII.
PUNCTUATION = r"[\p{P}$+<=>^`|~]"


@dataclass(slots=True)
class PreSplit:
    """The steps of a `pre_tokenizer` object.

    `byte_level`: words become bytes; `mapped`: the steps have done so already. `lead` replaces
    spaces and puts one in front (Metaspace), given whether the piece starts the text.
    """

    steps: list[Step]
    byte_level: bool = False
    mapped: bool = False
    lead: Callable[[str, bool], str] | None = None


def pre_split(spec: Mapping[str, Any] | None) -> PreSplit:
    """Return the steps that `spec` describes; UnsupportedError for an unknown pre-tokenizer."""
    specs = _flat(spec)
    out = PreSplit([])
    for i, step in enumerate(specs):
        name = str(step.get("type"))
        if name == "ByteLevel":
            _add_byte_level(out, step, last=i == len(specs) - 1)
        elif name == "Metaspace":
            _add_metaspace(out, step, alone=i == 0)
        elif name in SPLITS:
            out.steps.append(SPLITS[name](step))
        else:
            known = sorted([*SPLITS, "ByteLevel", "Metaspace", "Sequence"])
            raise UnsupportedError(f"Pre-tokenizer {name!r} of tokenizer.json is not supported", known)
    return out


def _flat(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [leaf for child in spec["pretokenizers"] for leaf in _flat(child)]
    return [spec]


def _add_byte_level(out: PreSplit, spec: Mapping[str, Any], *, last: bool) -> None:
    if out.byte_level:
        raise UnsupportedError("A tokenizer.json that maps text to bytes twice (two ByteLevel pre-tokenizers)")
    out.byte_level = True
    if spec.get("add_prefix_space", True):
        out.steps.append(lambda text: [text if text.startswith(" ") or not text else " " + text])
    if spec.get("use_regex", True):
        out.steps.append(isolate(GPT2))
    if not last:  # the next steps see the alphabet of bytes
        out.steps.append(lambda text: [byte_level(text)])
        out.mapped = True


def metaspace_scheme(spec: Mapping[str, Any]) -> str:
    """When Metaspace puts a space in front: "always", "first" (at a text's start) or "never"."""
    return str(spec.get("prepend_scheme", "always" if spec.get("add_prefix_space", True) else "never"))


def _add_metaspace(out: PreSplit, spec: Mapping[str, Any], *, alone: bool) -> None:
    mark = spec.get("replacement", SPACE)
    scheme = metaspace_scheme(spec)
    if mark != SPACE or (scheme == "first" and not alone):
        raise UnsupportedError(f"Metaspace with replacement {mark!r} and prepend scheme {scheme!r} after other steps")

    def lead(text: str, first: bool) -> str:
        text = text.replace(" ", mark)
        wanted = scheme == "always" or (scheme == "first" and first)
        return mark + text if wanted and not text.startswith(mark) else text

    if alone:
        out.lead = lead
    else:
        out.steps.append(lambda text: [lead(text, False)])
    if spec.get("split", True):
        out.steps.append(_split_step(literal(mark), "MergedWithNext", invert=False))


def _split_step(pattern: str, behavior: str, *, invert: bool) -> Step:
    join = BEHAVIORS.get(behavior.lower().replace("_", ""))
    if join is None:
        raise UnsupportedError(f"Split behavior {behavior!r} of tokenizer.json is not supported", sorted(BEHAVIORS))
    if behavior == "Isolated":  # matches and gaps alike: inverting changes nothing
        return isolate(pattern, from_file=True)
    compiled = file_pattern(pattern)

    def cut(text: str) -> list[str]:
        spans: list[tuple[int, int, bool]] = []
        at = 0
        for match in compiled.finditer(text, timeout=FILE_TIMEOUT_S):
            start, stop = match.span()
            if start > at:
                spans.append((at, start, invert))
            if stop > start:
                spans.append((start, stop, not invert))
            at = stop
        if at < len(text):
            spans.append((at, len(text), invert))
        return [text[start:stop] for start, stop in join(spans)]

    return cut


Spans = list[tuple[int, int, bool]]  # start, stop, whether it is a match
Pieces = list[tuple[int, int]]


def _isolated(spans: Spans) -> Pieces:
    return [(start, stop) for start, stop, _ in spans]


def _removed(spans: Spans) -> Pieces:
    return [(start, stop) for start, stop, is_match in spans if not is_match]


def _contiguous(spans: Spans) -> Pieces:
    out: Pieces = []
    before = None
    for start, stop, is_match in spans:
        if is_match == before:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
        before = is_match
    return out


def _merged_with_previous(spans: Spans) -> Pieces:
    """A match joins the gap before it; of several matches in a row only the first does."""
    out: Pieces = []
    before = False
    for start, stop, is_match in spans:
        if is_match and not before and out:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
        before = is_match
    return out


def _merged_with_next(spans: Spans) -> Pieces:
    """A match joins the gap after it; of several matches in a row only the last does."""
    out: Pieces = []
    after = False
    for start, stop, is_match in reversed(spans):
        if is_match and not after and out:
            out[-1] = (start, out[-1][1])
        else:
            out.append((start, stop))
        after = is_match
    return out[::-1]


BEHAVIORS: Mapping[str, Callable[[Spans], Pieces]] = {
    "isolated": _isolated,
    "removed": _removed,
    "contiguous": _contiguous,
    "mergedwithprevious": _merged_with_previous,
    "mergedwithnext": _merged_with_next,
}


def _split(spec: Mapping[str, Any]) -> Step:
    wanted = spec["pattern"]
    pattern = wanted["Regex"] if "Regex" in wanted else literal(wanted["String"])
    return _split_step(pattern, spec.get("behavior", "Isolated"), invert=bool(spec.get("invert", False)))


def _digits(spec: Mapping[str, Any]) -> Step:
    return isolate(r"\p{N}" if spec.get("individual_digits", False) else r"\p{N}+")


def _punctuation(spec: Mapping[str, Any]) -> Step:
    return _split_step(PUNCTUATION, spec.get("behavior", "Isolated"), invert=False)


def _whitespace(_spec: Mapping[str, Any]) -> Step:
    return _split_step(r"\w+|[^\w\s]+", "Removed", invert=True)


def _whitespace_split(_spec: Mapping[str, Any]) -> Step:
    return _split_step(r"\s", "Removed", invert=False)


def _delimiter(spec: Mapping[str, Any]) -> Step:
    return _split_step(literal(spec["delimiter"]), "Removed", invert=False)


SPLITS: Mapping[str, Callable[[Mapping[str, Any]], Step]] = {
    "Split": _split,
    "Digits": _digits,
    "Punctuation": _punctuation,
    "Whitespace": _whitespace,
    "WhitespaceSplit": _whitespace_split,
    "CharDelimiterSplit": _delimiter,
}
