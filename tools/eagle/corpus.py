"""A model's own answers to chat prompts, as token ids (read `target.py` next, which computes what the head sees of them).

A conversation is one row of ids with a mask: True where a token is the model's answer. Three in ten conversations have a
second turn; one in four is sampled at temperature 0.7, the others are greedy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle.prompts import FOLLOW_UPS, chat_prompts, split

from martlet import LLM, SamplingParams

__all__ = ["Conversation", "generate", "read_corpus"]

SAMPLED, SECOND_TURN = 0.25, 0.3  # parts of the conversations
BATCH = 64  # answered at once


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids, which of them the model wrote, and whether it wrote them greedily."""

    ids: list[int]
    answered: list[bool]
    greedy: bool


def generate(model: str, path: Path, *, count: int, tokens: int, seed: int, threads: int | None) -> None:
    """Append the answers to `count` prompts to `path`, one JSON line a conversation.

    `tokens` is the most of one answer. What is there already is kept and not asked again.
    """
    asked = chat_prompts(count, seed)
    done = sum(1 for _ in path.open(encoding="utf-8")) if path.exists() else 0
    if done >= count:
        return
    with (
        LLM(model, threads=threads, max_context=4 * tokens + 512, draft="off") as llm,
        path.open("a", encoding="utf-8") as out,
    ):
        for start in range(done, len(asked), BATCH):
            rng = random.Random(f"{seed} {start}")
            for line in _answer(llm, asked[start : start + BATCH], tokens, rng):
                out.write(json.dumps(_held(line)) + "\n")
            out.flush()
            print(f"generate: {min(start + BATCH, count)} of {count} prompts answered", flush=True)


def _held(line: Conversation) -> dict[str, object]:
    """What a line of the file holds: ids, the ranges that the model wrote, greedy or not."""
    return {"ids": line.ids, "answered": "".join("01"[a] for a in line.answered), "greedy": line.greedy}


def read_corpus(path: Path) -> Iterator[Conversation]:
    """The conversations of a file that `generate` wrote."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            held = json.loads(line)
            yield Conversation(held["ids"], [a == "1" for a in held["answered"]], held["greedy"])


def _answer(llm: LLM, prompts: list[str], tokens: int, rng: random.Random) -> list[Conversation]:
    greedy = [rng.random() >= SAMPLED for _ in prompts]
    params = [
        SamplingParams(temperature=0.0 if g else 0.7, seed=rng.getrandbits(31), max_tokens=tokens) for g in greedy
    ]
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(talks, params)
    lines = [_lengthen(Conversation([], [], g), output) for g, output in zip(greedy, outputs, strict=True)]
    again = [i for i in range(len(talks)) if rng.random() < SECOND_TURN]
    for i in again:
        answer = {"role": "assistant", "content": outputs[i].outputs[0].text}
        talks[i] = [*talks[i], answer, {"role": "user", "content": rng.choice(split(FOLLOW_UPS))}]
    second = llm.chat([talks[i] for i in again], [params[i] for i in again]) if again else []
    for i, output in zip(again, second, strict=True):
        lines[i] = _lengthen(lines[i], output)
    return lines


def _lengthen(line: Conversation, output: object) -> Conversation:
    """The conversation with one more prompt and answer, if the prompt goes on from it token by token."""
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)  # type: ignore[attr-defined]
    known = len(line.ids) if prompt[: len(line.ids)] == line.ids else 0
    answered = line.answered[:known] + [False] * (len(prompt) - known) + [True] * len(answer)
    return Conversation(prompt + answer, answered, line.greedy)
