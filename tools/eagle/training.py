"""Training a head, and measuring how many of its guesses a target would accept (read `head.py` first).

Each batch unrolls the head a few draft steps, in which it reads its own output as it will when it guesses ("training-time
test", arXiv:2503.01840). The loss of a step is the cross-entropy against the target's distribution over the draft vocabulary.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from eagle.head import Head
from eagle.target import Features, batches_by_length
from torch import Tensor
from torch.nn import functional

__all__ = ["Acceptance", "Plan", "batches", "measure", "step_loss", "train"]

DECAY = 0.8  # of the losses of later steps: a guess counts only if those before it were right


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train."""

    minutes: float
    batches: int | None = None  # at most
    steps: int = 3  # draft steps unrolled
    tokens: int = 1536  # of a batch
    rate: float = 5e-4
    report_minutes: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations side by side, the shorter ones padded."""

    features: Tensor  # [B, T, 3C]
    ids: Tensor  # [B, T + steps + 1]
    final: Tensor  # [B, T + steps + 1, C]: what the target's final norm makes of each position
    answered: Tensor  # [B, T + steps + 1]: whether a token is the model's
    known: Tensor  # the same: and the draft vocabulary has it

    @property
    def goal_rows(self) -> Tensor:
        """Of each token that can be guessed: its row of `goals`."""
        return self.known.flatten().cumsum(0).view(self.known.shape) - 1

    @torch.no_grad()
    def goals(self, head: Head) -> Tensor:
        """The target's distribution over the draft vocabulary of each token that can be guessed, [n, draft vocabulary]."""
        before = self.final[:, :-1][
            self.known[:, 1:]
        ]  # a token is told by what is before it; the first is never guessed
        return functional.linear(before, head.output).float().softmax(-1)

    @property
    def n_rows(self) -> int:
        """T."""
        return self.features.shape[1]

    def unroll(self, head: Head, steps: int) -> list[Tensor]:
        """What the head makes of each position in each step."""
        return head.unroll(self.features, self.ids[:, 1 : self.n_rows + steps], steps)

    def rows(self, of: Tensor, j: int) -> Tensor:
        """Of an array by position: what stands where step j of each row guesses, [B, T, …]."""
        return of[:, 2 + j : 2 + j + self.n_rows]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of greedy answers: the chance that guess 1, 2, … is right when all before it are, and what that gives."""

    chances: tuple[float, ...]

    @property
    def length(self) -> float:
        """Tokens a step: the accepted guesses and the target's own, of a chain as long as `chances`."""
        return 1.0 + sum(math.prod(self.chances[: n + 1]) for n in range(len(self.chances)))

    def __str__(self) -> str:
        return f"{' '.join(f'{chance:.3f}' for chance in self.chances)}: {self.length:.2f} tokens a step"


def train(head: Head, data: Features, chosen: list[int], plan: Plan, report: Callable[[int, int, float], None]) -> None:
    """Train on the conversations `chosen` as the plan says; `report` gets the step, the tokens seen and the loss."""
    sample = data.states[:: max(1, len(data.states) // 4096), :3].astype(np.float32)
    head.rescale(torch.from_numpy(np.sqrt(np.square(sample).mean(0)).reshape(-1) + 1e-3))
    matrices = [p for p in head.parameters() if p.dim() == 2]
    others = [p for p in head.parameters() if p.dim() != 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], plan.rate, (0.9, 0.95)
    )
    start = reported = time.monotonic()
    smooth, tokens, number = float("nan"), 0, 0
    for number, batch in enumerate(batches(head, data, chosen, plan)):
        gone = max((time.monotonic() - start) / (60 * plan.minutes), number / (plan.batches or math.inf))
        if gone >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = plan.rate * _schedule(gone, number)
        loss = step_loss(head, batch, plan)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        tokens += int(batch.answered.sum())
        smooth = loss.item() if number == 0 else 0.95 * smooth + 0.05 * loss.item()
        if time.monotonic() - reported > 60 * plan.report_minutes:
            report(number, tokens, smooth)
            reported = time.monotonic()
    report(number, tokens, smooth)


def _schedule(gone: float, number: int) -> float:
    """A warm-up of 20 steps, then a cosine down to 2 %, over the time there is."""
    return min(1.0, (number + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, gone))))


def step_loss(head: Head, batch: Batch, plan: Plan) -> Tensor:
    """The mean loss of all draft steps over the rows from which an engine would guess."""
    total, weight = torch.zeros(()), 0.0
    drafting = batch.answered[:, 1 : 1 + batch.n_rows]  # a guess is made once the model has answered token i + 1
    with torch.autocast("cpu", torch.bfloat16):
        goals = batch.goals(head)
        for j, x in enumerate(batch.unroll(head, plan.steps)):
            rows = drafting & batch.rows(batch.known, j)
            goal = goals[batch.rows(batch.goal_rows, j)[rows]]  # [rows, draft vocabulary]
            loss = functional.cross_entropy(head.logits(x[rows]).float(), goal)
            total = total + DECAY**j * loss
            weight += DECAY**j
    return total / weight


@torch.no_grad()
def measure(head: Head, data: Features, chosen: list[int], steps: int = 4) -> Acceptance:
    """How a chain of guesses fares in the greedy ones of the conversations."""
    tried, right = np.zeros(steps), np.zeros(steps)
    chosen = [i for i in chosen if data.lines[i].greedy]
    for group in batches_by_length([len(data.lines[i].ids) for i in chosen], 4096):
        batch = _batch(head, data, [chosen[i] for i in group], steps)
        alive = batch.answered[:, 1 : 1 + batch.n_rows]
        with torch.autocast("cpu", torch.bfloat16):
            for j, x in enumerate(batch.unroll(head, steps)):
                alive = alive & batch.rows(batch.answered, j)
                tried[j] += int(alive.sum())
                guesses = torch.full(alive.shape, -1)
                guesses[alive] = head.draft_ids[head.logits(x[alive]).argmax(-1)]
                alive = alive & (guesses == batch.rows(batch.ids, j))
                right[j] += int(alive.sum())
    return Acceptance(tuple(float(r / max(n, 1)) for n, r in zip(tried, right, strict=True)))


def batches(head: Head, data: Features, chosen: list[int], plan: Plan) -> Iterator[Batch]:
    """Batches of the conversations without end, in another order each time."""
    rng = random.Random(plan.seed)
    while True:
        mixed = chosen.copy()
        rng.shuffle(mixed)
        parts = [
            mixed[i : i + 256] for i in range(0, len(mixed), 256)
        ]  # lengths are similar within a batch, mixed over time
        for part in parts:
            groups = list(batches_by_length([len(data.lines[i].ids) for i in part], plan.tokens))
            rng.shuffle(groups)
            for group in groups:
                yield _batch(head, data, [part[i] for i in group], plan.steps)


def _batch(head: Head, data: Features, chosen: list[int], steps: int) -> Batch:
    width = max(len(data.lines[i].ids) for i in chosen) + steps + 1
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    answered = torch.zeros(len(chosen), width, dtype=torch.bool)
    states = torch.zeros(len(chosen), width, 4, data.states.shape[2])
    for row, i in enumerate(chosen):
        line, n = data.lines[i], len(data.lines[i].ids)
        ids[row, :n] = torch.tensor(line.ids)
        answered[row, :n] = torch.tensor(line.answered)
        states[row, :n] = torch.from_numpy(data.states[data.starts[i] : data.starts[i + 1]].astype(np.float32))
    t = width - steps - 1
    return Batch(states[:, :t, :3].flatten(2), ids, states[:, :, 3], answered, answered & head.t2d[ids])
