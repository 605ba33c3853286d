"""Pre-tokenizers: cut a text into the pieces that BPE may not merge across (read `bpe.py` next).

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`); `PRE_TOKENIZERS` holds the rules of each
name as published in the model's own tokenizer.json. The patterns are facts of the model; the names
and their grouping are llama.cpp's (src/llama-vocab.cpp). A rule list is a pipeline: each pattern
cuts every piece of the step before into its matches and the gaps between them, and loses nothing.
`from_json.py` builds the same pipeline from a tokenizer.json.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import regex

from martlet.errors import UnsupportedError, nearest

SPACE = "▁"  # SentencePiece's space

Step = Callable[[str], list[str]]
"""Cuts one piece into pieces."""

FILE_TIMEOUT_S = 5.0  # for a file's own pattern, on one text

# Linear time by construction: in every pattern below, a failed alternative gives back at most one
# run, and the next alternative consumes that run.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
O200K = CASED.replace("{0}", CONTRACTION + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
TEKKEN = CASED.replace("{0}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
CJK = r"[一-龥\u3040-ゟ゠-ヿ]+"
ASCII_PUNCT = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = (
    ASCII_PUNCT + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
)  # runs after digits and CJK are cut off
CASED_LETTER = (  # of DeepSeek-LLM: the letters of scripts with case
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    r"ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
LINE = r"[\r\n]"
# Whitespace at the end; the lookbehind keeps a long run elsewhere from being retried at every
# character.
TRAILING_SPACE = r"(?<!\s)\s++\Z"
WIDE_CJK = r"[一-龥ࠀ-一가-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rules of one pre-tokenizer name.

    `whole_words`: a piece that is itself a token becomes that token without merging
    (`ignore_merges` of tokenizer.json). `add_bos`: whether a file that does not say means to add
    the beginning-of-sequence token.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _table() -> dict[str, PreTokenizer]:
    """A line for each family: names, rules, and (as a comment) a model with that tokenizer.json."""
    p = PreTokenizer
    rows: list[tuple[str, PreTokenizer]] = [
        ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert", p((GPT2,))),  # gpt2
        ("mpt olmo jais trillion granite-docling exaone4", p((GPT2,))),  # mosaicml/mpt-7b, allenai/OLMo-1.7-7B-hf
        ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", p((r"\p{N}", GPT2))),  # SmolLM2-135M
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", p((LLAMA3,), True, True)),  # Llama-3-8B
        ("dbrx smaug-bpe chatglm-bpe", p((LLAMA3,))),  # databricks/dbrx-base, THUDM/glm-4-9b-chat
        ("glm4 glm5", p((LLAMA3,), True)),  # zai-org/GLM-4.5
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2", p((QWEN2,))),  # Qwen2-7B
        ("qwen35", p((QWEN35,))),  # Qwen/Qwen3.5
        ("deepseek-llm", p((LINE, rf"\s?[{CASED_LETTER}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", TRAILING_SPACE,
                            WIDE_CJK, r"\p{N}+"))),  # deepseek-ai/deepseek-llm-7b-base
        ("deepseek-coder", p((LINE, r"\s?\p{L}+", r"\s?\p{P}+", WIDE_CJK, r"\p{N}"))),  # deepseek-coder-6.7b-base
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", p((r"\p{N}{1,3}", CJK, DEEPSEEK3))),  # DeepSeek-V3, DeepSeek-R1
        ("falcon", p((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))),  # tiiuae/falcon-7b
        ("gpt-4o llama4 kanana2 o200k minimax-m2", p((O200K,))),  # openai o200k_base, Llama-4-Scout
        ("tekken", p((TEKKEN,), True, True)),  # mistralai/Mistral-Nemo-Base-2407
        ("bloom poro-chat gpt3-finnish", p((r" ?[^(\s|.,!?…。，、।۔،)]+",))),  # bigscience/bloom
        ("viking", p((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))),  # LumiOpen/Viking-7B
        ("seed-coder", p((CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES,))),
        ("bailingmoe bailingmoe2 llada-moe", p((BAILING,))),  # inclusionAI/Ling-lite
        ("default", p((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),  # what llama.cpp falls back to
    ]  # fmt: skip
    return {name: rules for names, rules in rows for name in names.split()}


PRE_TOKENIZERS = _table()


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rules called `name`; UnsupportedError names the known ones and the way around."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"Pre-tokenizer {name!r} is not known.{nearest(name, PRE_TOKENIZERS)} "
            "Text would be cut in other places than the model was trained on; "
            "if you know an equivalent one, pass its name as `pre`.",
            sorted(PRE_TOKENIZERS),
        ) from None


def file_pattern(pattern: str) -> Any:
    """Compile tokenizer.json's pattern as Oniguruma: ^ and $ match at lines, && intersects sets.

    Raises UnsupportedError for a pattern that `regex` does not take.
    """
    flags = regex.MULTILINE | (regex.VERSION1 if "&&" in pattern else regex.VERSION0)
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise UnsupportedError(f"The pattern {pattern[:80]!r} of tokenizer.json: {error}") from None


def literal(text: str) -> str:
    """The pattern that matches exactly `text`."""
    return str(regex.escape(text, special_only=True))


def isolate(pattern: str, *, from_file: bool = False) -> Step:
    """Return a step that cuts a text into the matches of `pattern` and the gaps between them.

    A pattern `from_file` may be hostile: its time on a text is bounded (TimeoutError).
    """
    compiled = file_pattern(pattern) if from_file else regex.compile(pattern)
    timeout_s = FILE_TIMEOUT_S if from_file else None
    return lambda text: _cut(compiled, text, timeout_s)


def _cut(compiled: Any, text: str, timeout_s: float | None) -> list[str]:
    if not compiled.groups:
        matches: list[str] = compiled.findall(text, timeout=timeout_s)
        if sum(map(len, matches)) == len(text):  # the usual case: matches cover everything
            return matches if "" not in matches else [piece for piece in matches if piece]
    pieces: list[str] = []
    at = 0
    for match in compiled.finditer(text, timeout=timeout_s):
        start, stop = match.span()
        if start > at:
            pieces.append(text[at:start])
        if stop > start:
            pieces.append(text[start:stop])
        at = stop
    if at < len(text):
        pieces.append(text[at:])
    return pieces


def pipeline(steps: list[Step]) -> Step:
    """Chain steps: each cuts every piece of the step before. Without steps, a text is one piece."""
    if len(steps) == 1:
        return steps[0]

    def cut(text: str) -> list[str]:
        pieces = [text]
        for step in steps:
            pieces = [smaller for piece in pieces for smaller in step(piece)]
        return pieces

    return cut


def word_splitter(tokens: Iterable[str]) -> Step:
    """Return a step that cuts before a run of ▁ where no token continues across the cut.

    A merge makes a token, so it cannot join what no token holds: cutting there changes no result
    (SentencePiece, arXiv:1808.06226, where a text is one word in principle).
    """
    joined = "\0".join(tokens)
    bound = sorted(set(regex.findall(rf"([^{SPACE}\0]){SPACE}", joined)))  # such as the > of ">▁</"
    chars = "".join(map(regex.escape, bound))
    further = rf"(?:(?<=[{chars}]){SPACE}+[^{SPACE}]*)*" if bound else ""
    words: Step = regex.compile(rf"{SPACE}*[^{SPACE}]+{further}|{SPACE}+").findall
    return words
