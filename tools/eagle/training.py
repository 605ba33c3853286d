"""Training a head, and measuring how many of its guesses a target would accept (read `head.py`
first).

Each batch unrolls the head a few draft steps, in which it reads its own output as it will when it
guesses ("training-time test", arXiv:2503.01840). The loss of a step is the cross-entropy against
the target's distribution over the draft vocabulary.

With logits n · W, W being the target's output rows of that vocabulary, and p the target's
distribution, it is

    logsumexp(n · W) - n · (p · W)        and its gradient        (softmax(n · W) - p) · W

so of p nothing but p · W is kept, [C] a row, and no [rows, vocabulary] array is ever whole: `Loss`
goes a few rows at a time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from eagle.corpus import Features, batches_by_length
from eagle.head import Head
from torch import Tensor
from torch.nn import functional

FEW = 256  # rows whose logits are computed together, so that they stay in the cache
# the chance that a batch unrolls one more step: as often as a guess is right and another one counts
GOES_ON = 0.4


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train."""

    minutes: float
    batches: int | None = None  # at most
    steps: int = 3  # draft steps unrolled, at most
    tokens: int = 2048  # of a batch
    rate: float = 5e-4
    # of what is learned: 1: the target's distribution; more: nearer to its likeliest tokens
    sharpness: float = 1.0
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

    @torch.no_grad()
    def goals(self, head: Head, sharpness: float = 1.0) -> Tensor:
        """p · W of each token: what the loss needs of the target's distribution over the draft
        vocabulary, [B, T + steps + 1, C].
        """
        found = torch.zeros_like(self.final)
        # a token is told by what is before it
        before = self.final[:, :-1][self.known[:, 1:]] * sharpness
        parts = [p @ head.output_16 for _, p in _distributions(before, head.output_16)]
        found[:, 1:][self.known[:, 1:]] = torch.cat(parts).float()
        return found

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
    """Of greedy answers: the chance that guess 1, 2, … is right when all before it are, and what
    that gives.
    """

    chances: tuple[float, ...]

    @property
    def length(self) -> float:
        """Tokens a step: the accepted guesses and the target's own, of a chain as long as
        `chances`.
        """
        return 1.0 + sum(math.prod(self.chances[: n + 1]) for n in range(len(self.chances)))

    def __str__(self) -> str:
        return f"{' '.join(f'{chance:.3f}' for chance in self.chances)}: {self.length:.2f} tokens a step"


def _distributions(n: Tensor, output: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A few rows of n [R, C] at a time: logsumexp [r] and softmax [r, draft vocabulary] of their
    logits.
    """
    for part in n.to(output.dtype).split(FEW):
        logits = functional.linear(part, output).float()
        total = logits.logsumexp(-1)
        yield total, (logits - total[:, None]).exp_().to(output.dtype)


class Loss(torch.autograd.Function):
    """The sum of the rows' cross-entropies: `apply(n [R, C], goals [R, C], output [draft
    vocabulary, C])`.
    """

    @staticmethod
    def forward(ctx: Any, n: Tensor, goals: Tensor, output: Tensor) -> Tensor:
        """The gradient is computed on the way: the logits are gone afterwards."""
        totals, means = zip(*((total, p @ output) for total, p in _distributions(n, output)), strict=True)
        ctx.save_for_backward(torch.cat(means).float() - goals)
        return torch.cat(totals).sum() - (n * goals).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Of n only."""
        [gradient] = ctx.saved_tensors
        return grads[0] * gradient, None, None


def train(head: Head, data: Features, chosen: list[int], plan: Plan, report: Callable[[int, int, float], None]) -> None:
    """Train on the conversations `chosen` as the plan says; `report` gets the step, the tokens seen
    and the loss.
    """
    sample = data.states[:: max(1, len(data.states) // 4096), :3].astype(np.float32)
    head.rescale(torch.from_numpy(np.sqrt(np.square(sample).mean(0)).reshape(-1) + 1e-3))
    optimisers = _optimisers(head, plan)
    start = reported = time.monotonic()
    smooth, tokens, number, rng = float("nan"), 0, 0, random.Random(plan.seed)
    for number, batch in enumerate(batches(head, data, chosen, plan)):
        gone = max((time.monotonic() - start) / (60 * plan.minutes), number / (plan.batches or math.inf))
        if gone >= 1:
            break
        for group in (group for optimiser in optimisers for group in optimiser.param_groups):
            group["lr"] = plan.rate * _schedule(gone, number)
        steps = 1
        while steps < plan.steps and rng.random() < GOES_ON:
            steps += 1
        loss = step_loss(head, batch, steps, plan.sharpness)
        head.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        tokens += int(batch.answered.sum())
        smooth = loss.item() if number == 0 else 0.95 * smooth + 0.05 * loss.item()
        if time.monotonic() - reported > 60 * plan.report_minutes:
            report(number, tokens, smooth)
            reported = time.monotonic()
    report(number, tokens, smooth)


def _optimisers(head: Head, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, whose updates have AdamW's size, and AdamW for the norms."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    others = [p for p in head.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, plan.rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, plan.rate, (0.9, 0.95), weight_decay=0.0)]


def _schedule(gone: float, number: int) -> float:
    """A warm-up of 20 steps, then a cosine down to 2 %, over the time there is."""
    return min(1.0, (number + 1) / 20) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, gone))))


def step_loss(head: Head, batch: Batch, steps: int, sharpness: float = 1.0) -> Tensor:
    """The mean loss of all draft steps over the rows from which an engine would guess."""
    total = torch.zeros(())
    # a guess is made once the model has answered token i + 1
    drafting = batch.answered[:, 1 : 1 + batch.n_rows]
    goals = batch.goals(head, sharpness)
    with torch.autocast("cpu", torch.bfloat16):
        made = batch.unroll(head, steps)
    for j, x in enumerate(made):
        rows = drafting & batch.rows(batch.known, j)
        loss = Loss.apply(head.norm(x[rows]), batch.rows(goals, j)[rows], head.output_16)  # type: ignore[no-untyped-call]
        total = total + loss / rows.sum()
    return total / steps


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
