"""Prompts that a model writes itself (Magpie, arXiv:2406.08464; read `corpus.py` next, which has
them answered).

A chat model that is given the beginning of a user's turn writes what users asked in its training.
So the prompts are as varied as those that it learned from, and nobody has to collect any. Half of
them get their first words, since a small model likes a few beginnings too much.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator

from martlet import LLM, SamplingParams

BATCH = 192  # written at once
SHORTEST, LONGEST = 2, 120  # words, tokens
ALIKE = 0.5  # of two prompts' words in common, from which on they are near
OPENERS = """What|What is|What are|What should|How|How do I|How does|How can I|Why|Why do|Who|Where|When|Which|Is it|Are|Do|Does|Can|Should I|Explain
Describe|Write|Write a|Give me|List|Suggest|Tell me|Summarize|Rewrite|Compare|Create|Make|Find|Help me|Translate|Define|Calculate|If|My|I|I have|In|The|A"""


def user_turn(llm: LLM) -> list[int]:
    """The chat template up to where the user's words begin: what prompts with different first words
    have in common.
    """
    one, other = (llm.chat_prompt([{"role": "user", "content": word}])[1] for word in ("Why", "a"))
    return one[: next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]


def _words(prompt: str) -> frozenset[str]:
    """What two prompts are compared by."""
    return frozenset(re.findall(r"\w+", prompt.lower()))


class Prompts:
    """Different prompts, none of them near one that is `held_back`."""

    def __init__(self, held_back: Collection[str]) -> None:
        self._held_back = [_words(prompt) for prompt in held_back]
        self._seen: set[frozenset[str]] = set()

    def take(self, prompt: str) -> bool:
        """Whether a prompt is fit, and new."""
        own = _words(prompt)
        fit = len(own) >= SHORTEST and own not in self._seen
        fit = fit and all(len(own & other) < ALIKE * len(own | other) for other in self._held_back)
        self._seen.add(own)
        return fit

    def written_by(self, llm: LLM, rng: random.Random) -> Iterator[str]:
        """Prompts that the model writes, without end."""
        tokenizer, start, openers = llm.get_tokenizer(), user_turn(llm), OPENERS.replace("\n", "|").split("|")
        while True:
            first = [rng.choice(openers) if rng.random() < 0.5 else "" for _ in range(BATCH)]
            params = [
                SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=rng.getrandbits(31), max_tokens=LONGEST)
                for _ in first
            ]
            outputs = llm.generate([start + tokenizer.encode(words) for words in first], params)
            for words, output in zip(first, outputs, strict=True):
                written = output.outputs[0]
                prompt = (words + written.text).strip()
                if written.finish_reason == "stop" and self.take(prompt):
                    yield prompt
