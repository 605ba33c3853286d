"""The replay capsule: one small file with which everything that an engine did can be done again
(read `capsule_replay.py` next).

It has what the outcome depends on: the requests' prompts and parameters, the seed, the settings,
what the model and the engine were, and the schedule as it was, step by step: which positions of
which sequences ran together, on which pages, who was preempted, what was saved, loaded and copied.
It also has the tokens that came of it, to compare. It is JSON:

    {"martlet_capsule": 2, "version": …, "model": {…}, "machine": {…}, "settings": {…},
     "requests": [{"id": "0", "prompt_ids": […], "params": {…}, "step": 1, "outputs": [[…]],
                   "finish": ["length"]}, …],
     "steps": [plan, 17, …]}

A plan is what `runtime/plan_codec.py` makes of it, without the ids that prompts and answers say,
and with a request's place in "requests" as its name. A number in "steps" means: so often again,
every span one position further, on the pages that it has.
"""

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from martlet.errors import FormatError
from martlet.metrics import Observer, StepRecord
from martlet.runtime.plan_codec import plan_row
from martlet.sampling_params import SamplingParams
from martlet.structured import Structured
from martlet.types import Event, Request, Scheduling, SeqId, StepPlan

FORMAT = 2
_MOST_NUMBERS = 4_000_000  # what a capsule holds at most, in numbers: some 20 MB
_MOST_BYTES = 256 << 20  # of a file that is read

Row = dict[str, Any]


class CapsuleWriter(Observer):
    """Records what an engine does, and writes the file when it closes."""

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        self._path = Path(path)
        # a folder that cannot be written: say so now
        self._path.parent.joinpath(f"{self._path.name}.partial").touch()
        self._header = dict(header)
        self._requests: list[Row] = []
        self._steps: list[Row | int] = []
        self._numbers: dict[str, int] = {}  # request id → its place in the list, while it runs
        self._sequences: dict[SeqId, tuple[int, int]] = {}  # → request's place, index
        # the spans that follow those of a step of decodes only
        self._previous: list[list[int]] | None = None
        self._n_steps = 0
        self._size = 0
        self._cut = False
        self._closed = False

    def accepted(self, request: Request, now: float) -> None:
        """A request: its place in the list is its name in the schedule."""
        if self._full(len(request.prompt_ids)):
            return
        self._numbers[request.request_id] = len(self._requests)
        row: Row = {
            "id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "params": params_row(request.params),
            "step": self._n_steps + 1,
            "outputs": [[] for _ in range(request.params.n)],
            "finish": [None] * request.params.n,
        }
        if request.scheduling != Scheduling():
            row["scheduling"] = {k: v for k, v in asdict(request.scheduling).items() if v}
        if request.adapter:
            row["adapter"] = request.adapter
        if request.n_answered:
            row["answered"] = request.n_answered
        self._requests.append(row)

    def stepped(self, record: StepRecord) -> None:
        """A step, and what it sampled."""
        if self._full(5 * len(record.plan.spans)):
            return
        self._add(record.plan)
        for sampled in record.result.sampled:
            if sampled.token_id is not None and sampled.seq in self._sequences:
                number, index = self._sequences[sampled.seq]
                self._requests[number]["outputs"][index] += [sampled.token_id, *(more[0] for more in sampled.more)]
        self._end(record.events)

    def broke(self, plan: StepPlan) -> None:
        """A step that raised, part of the schedule: the replay shows whether it fails again."""
        if not self._full(5 * len(plan.spans)):
            self._previous = None  # a row of its own
            self._add(plan)
            step = self._steps[-1]
            assert isinstance(step, dict)
            step["failed"] = True
            self._previous = None

    def ended(self, events: Iterable[Event], now: float) -> None:
        """Sequences that ended between two steps."""
        self._end(events)

    def close(self) -> None:
        """Write the file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        capsule = {**self._header, "requests": self._requests, "steps": self._steps}
        if self._cut:
            capsule["cut"] = True
        partial = self._path.parent / f"{self._path.name}.partial"
        try:
            partial.write_text(json.dumps(capsule, separators=(",", ":")), encoding="utf-8")
            os.replace(partial, self._path)
        except OSError as error:
            warnings.warn(f"the capsule {self._path} was not written: {error}", RuntimeWarning, stacklevel=2)
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _full(self, more: int) -> bool:
        self._size += more
        if self._size > _MOST_NUMBERS and not self._cut:
            self._cut = True
            warnings.warn(f"the capsule {self._path} ends at step {self._n_steps}", RuntimeWarning, stacklevel=3)
        return self._cut

    def _add(self, plan: StepPlan) -> None:
        self._n_steps += 1
        for new in plan.added:
            self._sequences[new.seq] = self._numbers[new.request_id], new.index
        named = tuple(replace(new, request_id=str(self._numbers[new.request_id])) for new in plan.added)
        row = plan_row(replace(plan, step=self._n_steps, added=named), with_ids=False)
        again = row == {"step": self._n_steps, "spans": self._previous}
        decodes = all(span.count == span.n_logits == 1 for span in plan.spans)
        self._previous = [[span.seq, span.start + 1, 1, 1] for span in plan.spans] if decodes else None
        if not again:
            self._steps.append(row)
        elif isinstance(self._steps[-1], int):
            self._steps[-1] += 1
        else:
            self._steps.append(1)

    def _end(self, events: Iterable[Event]) -> None:
        for event in events:
            number = self._numbers.get(event.request_id)
            if event.finish is None or number is None or self._cut:
                continue
            finish = self._requests[number]["finish"]
            finish[event.index] = str(event.finish)
            if None not in finish:
                del self._numbers[event.request_id]


def params_row(params: SamplingParams) -> Row:
    """The parameters that differ from the defaults, as JSON takes them."""
    defaults = SamplingParams()
    row: Row = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        if value != getattr(defaults, field.name):
            if isinstance(value, Structured):
                value = value.row()
            row[field.name] = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value
    return row


def read_capsule(path: str | Path) -> dict[str, Any]:
    """A capsule's contents; FormatError if it is none. The replay checks what they say."""
    path = Path(path)
    if path.stat().st_size > _MOST_BYTES:
        raise FormatError(path, f"holds {path.stat().st_size:,} bytes; a capsule has at most {_MOST_BYTES:,}")
    try:
        capsule = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"is not a capsule: {error}") from None
    if not isinstance(capsule, dict) or "martlet_capsule" not in capsule:
        raise FormatError(path, "is not a capsule: it does not say martlet_capsule")
    if capsule["martlet_capsule"] != FORMAT:
        raise FormatError(
            path,
            f"is a capsule of format {capsule['martlet_capsule']!r}, and this version reads {FORMAT}: replay it with the version"
            f" that recorded it ({capsule.get('version')!r:.40}), or record it again",
        )
    for name, kind in (("model", dict), ("machine", dict), ("settings", dict), ("requests", list), ("steps", list)):
        if not isinstance(capsule.get(name), kind):
            raise FormatError(path, f"is not a whole capsule: {name!r} is {type(capsule.get(name)).__name__}")
    return capsule
