"""A model's own answers to chat prompts, as token ids, and its states at each (read `training.py`
next, which learns from them).

A conversation is one row of ids with a mask: True where a token is the model's answer. Seven
prompts in ten are the model's own (`magpie.py`), the others made of templates (`prompts.py`); one
conversation in seven has a second turn; one in seven is sampled at temperature 0.7, the others are
greedy. The states of all conversations, end to end, are a file of their own.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from eagle.magpie import Prompts
from eagle.prompts import FOLLOW_UPS, chat_prompts, split
from eagle.recorder import F16, KEPT, Recorder
from numpy.typing import NDArray

from martlet import LLM, SamplingParams
from martlet.llm import RequestOutput

# parts of the conversations: the model's own prompts; …
WRITTEN, SAMPLED, SECOND_TURN = 0.7, 0.15, 0.15
BATCH = 576  # asked together
RUNNING = 96  # and answered at once


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids, which of them the model wrote, whether it wrote them greedily, and what it was
    asked first, by whom.
    """

    ids: list[int]
    answered: list[bool]
    greedy: bool
    prompt: str = ""
    written: bool = False  # the prompt is the model's own


@dataclass(frozen=True, slots=True)
class Features:
    """All conversations end to end, and the kept rows of each token; those of a conversation's last
    are zeros.
    """

    lines: list[Conversation]
    starts: NDArray[np.int64]  # where each begins, and the end
    states: F16  # [tokens, 4, C], on disk


def read_corpus(path: Path) -> Iterator[Conversation]:
    """The conversations of a file that `generate` wrote."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            held = json.loads(line)
            yield Conversation(**{**held, "answered": [a == "1" for a in held["answered"]]})


def open_features(lines: Sequence[Conversation], path: Path, hidden: int) -> Features:
    """The file of kept rows as an array, with those conversations that it has whole."""
    starts = np.cumsum([0, *(len(line.ids) for line in lines)])
    n_lines = int(np.searchsorted(starts, path.stat().st_size // (KEPT * hidden * 2), "right")) - 1
    shape = (int(starts[n_lines]), KEPT, hidden)
    states = np.memmap(path, np.float16, "r", shape=shape)
    return Features(list(lines[:n_lines]), starts[: n_lines + 1], states)


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar lengths, of at most `tokens` when padded."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[i] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate: so many conversations with answers of up to so many tokens, none near a
    prompt that is held back.
    """

    count: int
    tokens: int
    seed: int
    threads: int | None = None
    longest_prompt: int = 512
    held_back: Collection[str] = ()


def generate(model: str, corpus: Path, states: Path, order: Order) -> None:
    """Append conversations to `corpus`, one JSON line each, and their states to `states`. What is
    there already is kept.
    """
    done = list(read_corpus(corpus)) if corpus.exists() else []
    if len(done) >= order.count:
        return
    prompts = Prompts(order.held_back)
    for line in done:
        prompts.take(line.prompt)
    context = 4 * order.tokens + order.longest_prompt
    with LLM(
        model, threads=order.threads, max_context=context, max_seqs=RUNNING, draft="off", prefix_cache=False
    ) as llm:
        recorder = Recorder(llm)
        size = sum(len(line.ids) for line in done) * recorder.token_bytes
        while len(done) < order.count:
            rng = random.Random(f"{order.seed} {len(done)}")
            asked = list(itertools.islice(_prompts(llm, prompts, rng), min(BATCH, order.count - len(done))))
            recorder.take()  # what it computed for writing prompts
            lines = _answer(llm, asked, order.tokens, rng)
            size = _write(states, size, lines, recorder.take())
            with corpus.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(_held(line)) + "\n" for line in lines)
            done += lines
            n_tokens = sum(sum(line.answered) for line in done)
            print(f"generate: {len(done)} of {order.count} prompts answered, {n_tokens} tokens", flush=True)


def _write(path: Path, size: int, lines: list[Conversation], found: dict[tuple[int, ...], F16]) -> int:
    """Write the states of conversations after the first `size` bytes; returns the new size."""
    path.touch()
    with path.open("r+b") as out:
        out.truncate(size)
        out.seek(size)
        for line in lines:
            rows = found[tuple(line.ids)]
            np.concatenate((rows, np.zeros_like(rows[:1]))).tofile(out)
        return out.tell()


def _held(line: Conversation) -> dict[str, object]:
    """What a line of the file holds."""
    return {**asdict(line), "answered": "".join("01"[a] for a in line.answered)}


def _prompts(llm: LLM, prompts: Prompts, rng: random.Random) -> Iterator[tuple[str, bool]]:
    """Prompts, and whether the model wrote them, without end."""
    made = (prompt for prompt in chat_prompts(BATCH, rng.getrandbits(31)) if prompts.take(prompt))
    written = prompts.written_by(llm, rng)
    while True:
        own = rng.random() < WRITTEN
        yield next(written) if own else next(made), own


def _answer(llm: LLM, asked: list[tuple[str, bool]], tokens: int, rng: random.Random) -> list[Conversation]:
    greedy = [rng.random() >= SAMPLED for _ in asked]
    params = [
        SamplingParams(temperature=0.0 if g else 0.7, seed=rng.getrandbits(31), max_tokens=tokens) for g in greedy
    ]
    talks = [[{"role": "user", "content": prompt}] for prompt, _ in asked]
    outputs = llm.chat(talks, params)
    lines = [
        _lengthen(Conversation([], [], g, prompt, own), output)
        for g, (prompt, own), output in zip(greedy, asked, outputs, strict=True)
    ]
    again = [i for i in range(len(talks)) if rng.random() < SECOND_TURN]
    for i in again:
        answer = {"role": "assistant", "content": outputs[i].outputs[0].text}
        talks[i] = [*talks[i], answer, {"role": "user", "content": rng.choice(split(FOLLOW_UPS))}]
    second = llm.chat([talks[i] for i in again], [params[i] for i in again]) if again else []
    for i, output in zip(again, second, strict=True):
        lines[i] = _lengthen(lines[i], output)
    return lines


def _lengthen(line: Conversation, output: RequestOutput) -> Conversation:
    """The conversation with one more prompt and answer, if the prompt goes on from it token by
    token.
    """
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    known = len(line.ids) if prompt[: len(line.ids)] == line.ids else 0
    answered = line.answered[:known] + [False] * (len(prompt) - known) + [True] * len(answer)
    return replace(line, ids=prompt + answer, answered=answered)
