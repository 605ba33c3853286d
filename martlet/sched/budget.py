"""What is left of a step for prompts, in tokens and in seconds (read `cost.py` next).

Sequences that decode come first; prompts get what is left of max_step_tokens and of the longest time that a step may take
while anybody decodes, so that a long prompt never stops a running answer (arXiv:2308.16369). A few rows are
always left, so that prompts never stop either.
"""

from __future__ import annotations

from dataclasses import dataclass

from martlet.sched.cost import CostModel

__all__ = ["MORE", "StepBudget", "stall_limit"]

MORE = 2.25  # a step with prompts may take so many times as long as one that only decodes,
CROWDED = 3.0  # and so many times for each prompt that waits for a sequence that decodes, if that is more
MOST = 12.0  # the same where a prompt's time to first token is in danger, or more wait for it than decode
ROWS = 2  # least of a chunk: fewer rows leave a tile of the attention kernels half empty
ITL_SHARE = 0.9  # of an inter-token target, for a step: the rest is for what the model does not know


@dataclass(slots=True)
class StepBudget:
    """Counts down while a step is planned. `seconds` is None where nobody waits for the step."""

    cost: CostModel
    page_size: int
    tokens: int
    scores: int  # rows of logits that prompts may ask for, beyond the one kept for each sequence
    seconds: float | None = None
    closed: bool = False  # nothing for prompts in this step, which shows what decoding takes
    layered: bool = False  # a chunk goes through some of the layers: one of a step

    @property
    def is_spent(self) -> bool:
        """Whether no time is left for a prompt."""
        return self.closed or (self.seconds is not None and self.seconds <= 0.0)

    def chunk(self, start: int, remaining: int) -> int:
        """How many of a prompt's remaining positions to compute; 0 if nothing is left for it."""
        if self.closed:
            return 0
        count = max(0, min(remaining, self.tokens))  # below 0: a chunk between layers took rows that guesses had
        if self.seconds is not None:
            within = self.cost.prefill_within(max(0.0, self.seconds), start, count)
            if within < count:  # whole pages, or at least whole tiles of rows: what the kernels work in
                end = (start + within) // self.page_size * self.page_size
                count = end - start if end >= start + ROWS else within // ROWS * ROWS
        return count

    def least(self, remaining: int) -> int:
        """What the first prompt of a step gets in any case."""
        return 0 if self.closed else max(0, min(remaining, self.tokens, ROWS))

    def layers(self, start: int, count: int, n_layers: int, first: int) -> int:
        """How many layers, from `first` on, a chunk goes through in this step: at least one.

        What is left after that many is shared evenly among the steps that it takes, so that none is longer than it must.
        """
        left = n_layers - first
        if self.seconds is None:
            return left
        most = int(max(0.0, self.seconds) * n_layers / self.cost.prefill_s(start, count))
        return -(-left // -(-left // min(max(most, 1), left)))

    def spend(self, start: int, count: int, n_logits: int, share: float = 1.0) -> None:
        """Take off what a span takes, that goes through a share of the layers."""
        self.tokens -= count
        self.scores -= max(0, n_logits - 1)
        if self.seconds is not None:
            self.seconds -= share * self.cost.prefill_s(start, count)


def stall_limit(
    decode_s: float,
    crowd: float,
    stall_s: float | None,
    itl_target_s: float | None,
    urgent: tuple[float, float] | None,
) -> float:
    """Seconds that prompts may add to a step whose decoding part takes `decode_s`.

    `stall_s` and `itl_target_s`, the smallest of those that decode, bound the step. Without `stall_s` it is MORE times
    the decoding part, or CROWDED times as often as prompts wait for each sequence that decodes (`crowd`): whose time is
    spent, theirs or the decoding ones', counts by the head. `urgent` is what a prompt still takes to compute and the time to its deadline: their ratio is the
    share of all time that it needs, and the step is as long as that makes it, up to MOST times the decoding part.
    """
    if stall_s is not None:
        limit = stall_s
    else:
        factor = min(MOST, max(MORE, CROWDED * crowd))
        if urgent is not None:
            left_s, to_deadline_s = urgent
            share = min(1.0, left_s / to_deadline_s) if to_deadline_s > 0.0 else 1.0
            factor = min(MOST, max(factor, 1.0 / max(1.0 - share, 1.0 / MOST)))
        limit = factor * decode_s
    if itl_target_s is not None:
        limit = min(limit, ITL_SHARE * itl_target_s)
    return limit - decode_s
