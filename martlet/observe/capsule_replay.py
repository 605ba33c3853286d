"""Run a capsule again: the recorded plans in their order, on the same model, and compare what comes
of them.

The recorded schedule takes the scheduler's place: whatever was batched, shared, preempted or
brought back from disk then is so again, so an answer that was wrong is wrong again, in the same
step. A capsule is untrusted input: every plan is checked against what the runner holds before it
runs (read `capsule.py` for the file).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from martlet.config import EngineConfig
from martlet.errors import MartletError, RequestError
from martlet.runtime.executors import Executor
from martlet.runtime.plan_codec import PlanLimits, PlanReader
from martlet.sampling_params import SamplingParams, validate_for_vocab
from martlet.types import Added, Request, SeqId, SlotId, Started, StepPlan, stop_ids

_SETTINGS = {field.name for field in fields(EngineConfig)} - {"origins"}
_NOT_AGAIN = {
    "model",
    "trace",
    "capsule",
    "chat_template",
    "kv_disk",
    "kv_disk_size",
    "packed",
    "draft",
    "lora",
}  # files, and what is decided here


@dataclass(slots=True)
class ReplayedStep:
    """A step that ran again. Its sequences have their callers' names: (request id, index)."""

    plan: StepPlan
    names: Mapping[SeqId, tuple[str, int]]
    came: list[tuple[SeqId, int]] = field(default_factory=list)  # (sequence, token id)
    # (sequence, token now, token then)
    differ: list[tuple[SeqId, int, int | None]] = field(default_factory=list)
    error: str | None = None


def replay_options(
    capsule: Mapping[str, Any], kv_disk: str | None, lora: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The engine's settings as they were; pages that went to disk go to the folder `kv_disk`.

    Adapters are loaded from where they were, if they are there still, and from where `lora` says.
    """
    settings = capsule["settings"]
    again = {n: v for n, v in settings.items() if v is not None and n in _SETTINGS and n not in _NOT_AGAIN}
    then = settings.get("lora") if isinstance(settings.get("lora"), Mapping) else {}
    if here := {name: path for name, path in then.items() if Path(str(path)).exists()} | dict(lora or {}):
        again["lora"] = here
    again["draft"] = "off"  # guesses are part of the plans
    if settings.get("kv_disk") is not None:
        again |= {"kv_disk": kv_disk, "kv_disk_size": settings.get("kv_disk_size")}
    return again


def differences(capsule: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """How this engine differs from the recorded one: what makes the replay pointless, and what may
    change its bits.

    `here` is the header that a capsule of this engine would have.
    """
    model, now = capsule["model"], here["model"]
    grave = []
    if model.get("fingerprint") != now["fingerprint"]:
        grave.append(
            f"the model is not {model.get('file')!r} as it was recorded ({now['file']!r} has another fingerprint)"
        )
    light = []
    if capsule.get("version") != here["version"]:
        light.append(f"recorded by version {capsule.get('version')!r}, replayed by {here['version']!r}")
    if capsule["machine"].get("kernels") != here["machine"]["kernels"]:
        light.append(
            f"recorded with kernels {capsule['machine'].get('kernels')!r}, here {here['machine']['kernels']!r}"
        )
    if unknown := sorted(set(capsule["settings"]) - _SETTINGS):
        light.append(f"recorded with settings that are not known here: {', '.join(unknown)}")
    return grave, light


def missing_adapters(capsule: Mapping[str, Any], loaded: Collection[str]) -> list[str]:
    """The digests of adapters that requests of the capsule ran with, and which are not here."""
    rows = [row for row in capsule["requests"] if isinstance(row, Mapping)]
    return sorted({str(row["adapter"]) for row in rows if row.get("adapter")} - set(loaded))


class Schedule:
    """A capsule's requests and plans. Raises RequestError, naming the step, for wrong plans."""

    def __init__(self, capsule: Mapping[str, Any], limits: PlanLimits, eos_ids: frozenset[int] = frozenset()) -> None:
        self._steps = capsule["steps"]
        self._limits, self._eos_ids = limits, eos_ids
        self._reader = PlanReader(limits, self._text)
        self._texts: dict[SeqId, list[int]] = {}  # prompts and what was sampled, in this run
        # written by this schedule, and the keys that they hold
        self._slots: dict[SlotId, bytes] = {}
        self.requests: list[Request] = []
        self.outputs: list[list[list[int]]] = []
        for number, row in enumerate(capsule["requests"]):
            self._read_request(f"Request {number} of the capsule", row)

    def place(self, seq: SeqId) -> tuple[int, int]:
        """A sequence's request, by its number, and its index in it."""
        return self._place(self._reader.added[seq])

    def names(self) -> dict[SeqId, tuple[str, int]]:
        """The request id and the index of each sequence that has begun and not ended."""
        places = {seq: self._place(added) for seq, added in self._reader.added.items()}
        return {seq: (self.requests[number].request_id, index) for seq, (number, index) in places.items()}

    def grow(self, seq: SeqId, tokens: Sequence[int]) -> None:
        """Tokens were sampled for a sequence."""
        self._texts[seq] += tokens

    def plans(self) -> Iterator[tuple[StepPlan, list[Started], bool]]:
        """The plans in order, their new sequences, and whether their steps failed; the one before
        must have run.
        """
        plan = StepPlan(0, ())
        for row in self._steps:
            if isinstance(row, int):
                if not plan.spans:
                    raise self._reader.wrong(f"no spans and comes {row} times again", "some")
                for _ in range(row):
                    spans = [[span.seq, span.start + span.count, 1, 1] for span in plan.spans]
                    plan = self._read({"step": plan.step + 1, "spans": spans})
                    yield plan, [], False
                continue
            failed = isinstance(row, dict) and bool(row.get("failed"))
            plan = self._read({k: v for k, v in row.items() if k != "failed"} if failed else row)
            yield plan, [self._started(added) for added in plan.added], failed

    def _read(self, row: Any) -> StepPlan:
        plan = self._reader.read(row)
        for seq in plan.dropped:
            self._texts.pop(seq, None)
        self._slots.update((save.slot, save.key) for save in plan.saves)
        for load in plan.loads:
            if self._slots.get(load.slot) != load.key:
                raise self._reader.wrong(
                    f"a page from disk that an earlier engine had written (slot {load.slot})",
                    "pages of this one: record with an empty kv_disk",
                )
        return plan

    def _started(self, added: Added) -> Started:
        number, index = self._place(added)
        self._text(added)
        request = self.requests[number]
        return Started(added.seq, request, index, stop_ids(request.params, self._eos_ids))

    def _text(self, added: Added) -> list[int]:
        """A sequence's ids by now."""
        if added.seq not in self._texts:
            self._texts[added.seq] = list(self.requests[self._place(added)[0]].prompt_ids)
        return self._texts[added.seq]

    def _place(self, added: Added) -> tuple[int, int]:
        number = int(added.request_id) if added.request_id.isdecimal() and len(added.request_id) < 10 else -1
        if not 0 <= number < len(self.requests) or added.index >= self.requests[number].params.n:
            raise self._reader.wrong(f"index {added.index} of request {added.request_id!r:.60}", "one that is here")
        return number, added.index

    def _read_request(self, where: str, row: Any) -> None:
        if not isinstance(row, dict) or not isinstance(row.get("params"), dict) or not isinstance(row.get("id"), str):
            raise _wrong(f"{where} has not id, prompt_ids, params and outputs")
        params = SamplingParams.from_dict(row["params"])
        validate_for_vocab(params, self._limits.vocab)
        outputs, prompt, n_answered = row.get("outputs"), row.get("prompt_ids"), row.get("answered", 0)
        if not isinstance(outputs, list) or len(outputs) != params.n or not prompt:
            raise _wrong(f"{where} has not a prompt and {params.n} outputs")
        if not all(isinstance(ids, list) and all(map(self._is_id, ids)) for ids in (prompt, *outputs)):
            raise _wrong(f"{where} has ids that are not whole numbers from 0 to {self._limits.vocab - 1}")
        if type(n_answered) is not int or not 0 <= n_answered <= len(prompt):
            raise _wrong(f"{where} has an answer of {n_answered!r:.60} ids in its prompt")
        adapter = row.get("adapter", "")
        if not isinstance(adapter, str) or (adapter and adapter not in self._limits.adapters):
            raise _wrong(f"{where} has the adapter {adapter!r:.80}, which is not loaded here")
        self.requests.append(Request(row["id"], tuple(prompt), params, adapter=adapter, n_answered=n_answered))
        self.outputs.append([list(answer) for answer in outputs])

    def _is_id(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < self._limits.vocab


def _wrong(message: str) -> RequestError:
    return RequestError(f"{message}.", param="capsule")


def replay(capsule: Mapping[str, Any], executor: Executor, schedule: Schedule) -> Iterator[ReplayedStep]:
    """Run the steps; yields each after it ran. Raises RequestError for an impossible plan."""
    then = schedule.outputs
    seen = [[0] * len(outputs) for outputs in then]
    for plan, started, failed in schedule.plans():
        step = ReplayedStep(plan, schedule.names())
        try:
            result = executor.run(plan, started)
        except (MartletError, ArithmeticError, ValueError, OSError) as error:
            if not failed:
                raise
            step.error = str(error)
            yield step
            continue
        if result.failed_loads:
            step.error = f"{len(result.failed_loads)} pages could not be read back from disk"
        for sampled in result.sampled:
            if sampled.token_id is None:
                step.error = sampled.error or step.error
                continue
            tokens = (sampled.token_id, *(token_id for token_id, _ in sampled.more))
            schedule.grow(sampled.seq, tokens)
            number, index = schedule.place(sampled.seq)
            for token_id in tokens:
                recorded, position = then[number][index], seen[number][index]
                seen[number][index] += 1
                expected = recorded[position] if position < len(recorded) else None
                step.came.append((sampled.seq, token_id))
                if expected != token_id and not failed:
                    step.differ.append((sampled.seq, token_id, expected))
        yield step
    missing = sum(len(r) - n for rs, ns in zip(then, seen, strict=True) for r, n in zip(rs, ns, strict=True))
    if missing > 0:
        raise RequestError(f"The schedule ends {missing} tokens before the recorded answers do.", param="steps")


def verdict(capsule: Mapping[str, Any], n_differ: int, source: str | Path) -> str:
    """The last line of a replay."""
    answers = sum(len(request["outputs"]) for request in capsule["requests"])
    tokens = sum(len(answer) for request in capsule["requests"] for answer in request["outputs"])
    cut = "; the recording ends before its engine did" if capsule.get("cut") else ""
    if n_differ:
        return f"{source}: {n_differ} of {tokens} tokens are not the recorded ones{cut}"
    return f"{source}: {answers} answers, {tokens} tokens, all as recorded{cut}"
