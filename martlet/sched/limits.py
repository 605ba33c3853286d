"""Bounds of a step, of a sequence and of the queue (`scheduler.py` keeps them)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a scheduler. None is "no bound", except for `stall_s`."""

    context: int  # ids of one sequence, prompt and generated
    max_step_tokens: int
    max_seqs: int  # sequences that run at a time
    max_logits: int  # rows of a step that may ask for logits
    max_waiting: int | None = None  # waiting sequences
    max_waiting_tokens: int | None = None  # prompt tokens of the waiting sequences
    stall_s: float | None = None  # longest step while a sequence decodes; None: see `budget.py`
    layered_rows: int = 0  # rows of a chunk that takes several steps for `n_layers`; 0: none does
    n_layers: int = 1

    def __post_init__(self) -> None:
        assert self.context >= 1
        assert self.max_step_tokens >= self.max_seqs >= 1
        assert self.max_logits >= self.max_seqs
