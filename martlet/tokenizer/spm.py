"""SentencePiece's BPE, where each token has a score (arXiv:1808.06226; read `encoder.py` for the walk over words).

A space is the character ▁. Neighbours whose joined text is a token merge, best score first. A text is one word in
principle; `word_splitter` finds where no token can reach across, so that words can be remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from martlet.errors import FormatError
from martlet.tokenizer.split import Step

__all__ = ["SPACE", "SPACES_FROM", "escape_space", "score_ranks", "word_splitter"]

SPACE = "▁"
SPACES_FROM = {SPACE: " "}


def escape_space(text: str) -> str:
    """Return `text` with ▁ for each space."""
    return text.replace(" ", SPACE)


def score_ranks(
    texts: Sequence[str], scores: NDArray[Any], candidates: Iterable[int], *, source: str
) -> dict[str, int]:
    """Return the rank of each token that merging may make: 0 for the best score, equal for equal scores."""
    ids = [token for token in candidates if len(texts[token]) > 1]
    if not ids:
        return {}
    values = np.asarray(scores, dtype=np.float64)[ids]
    if np.isnan(values).any():
        raise FormatError(source, "a token's score is not a number; expected one for each token. Get another file.")
    ranks = np.unique(-values, return_inverse=True)[1]
    return dict(zip([texts[token] for token in ids], ranks.tolist(), strict=True))


def word_splitter(tokens: Iterable[str]) -> Step:
    """Return a step that cuts before each run of ▁ where no token of `tokens` continues from the character before it.

    A merge makes a token, so it cannot join what no token holds: cutting there changes no result.
    """
    joined = "\0".join(tokens)
    bound = sorted(set(regex.findall(rf"([^{SPACE}\0]){SPACE}", joined)))  # such as the > of ">▁</"
    chars = "".join(map(regex.escape, bound))
    further = rf"(?:(?<=[{chars}]){SPACE}+[^{SPACE}]*)*" if bound else ""
    words: Step = regex.compile(rf"{SPACE}*[^{SPACE}]+{further}|{SPACE}+").findall
    return words
