"""Run a capsule again: the recorded plans in their order, on the same model, and compare what comes of them.

The recorded schedule takes the scheduler's place: whatever was batched, shared, preempted or brought back from disk then
is so again, so an answer that was wrong is wrong again, in the same step. A capsule is untrusted input: every plan is
checked against what the runner holds before it runs (read `capsule.py` for the file).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from martlet.config import EngineConfig
from martlet.errors import MartletError, RequestError
from martlet.observe.capsule_plans import Schedule
from martlet.runtime.executors import Executor
from martlet.types import SeqId, StepPlan

__all__ = ["ReplayedStep", "differences", "missing_adapters", "replay", "replay_options", "verdict"]

_SETTINGS = {field.name for field in fields(EngineConfig)} - {"origins"}
_NOT_AGAIN = {
    "model",
    "trace",
    "capsule",
    "chat_template",
    "kv_disk",
    "kv_disk_size",
    "draft",
    "lora",
}  # files, and what is decided here


@dataclass(slots=True)
class ReplayedStep:
    """One step that ran again. Sequences are named as their caller knew them: (request id, index)."""

    plan: StepPlan
    names: Mapping[SeqId, tuple[str, int]]
    came: list[tuple[SeqId, int]] = field(default_factory=list)  # (sequence, token id)
    differ: list[tuple[SeqId, int, int | None]] = field(default_factory=list)  # (sequence, token now, token then)
    error: str | None = None


def replay_options(
    capsule: Mapping[str, Any], kv_disk: str | None, lora: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The engine's settings as they were; pages that went to disk go to the folder `kv_disk`.

    Adapters are loaded from where they were, if they are there still, and from where `lora` says.
    """
    settings = capsule["settings"]
    found = {n: v for n, v in settings.items() if v is not None and n in _SETTINGS and n not in _NOT_AGAIN}
    then = settings.get("lora") if isinstance(settings.get("lora"), Mapping) else {}
    if here := {name: path for name, path in then.items() if Path(str(path)).exists()} | dict(lora or {}):
        found["lora"] = here
    found["draft"] = "off"  # guesses are part of the plans
    if settings.get("kv_disk") is not None:
        found |= {"kv_disk": kv_disk, "kv_disk_size": settings.get("kv_disk_size")}
    return found


def differences(capsule: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """How this engine differs from the recorded one: what makes the replay pointless, and what may change its bits.

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


def replay(capsule: Mapping[str, Any], executor: Executor, schedule: Schedule) -> Iterator[ReplayedStep]:
    """Run every step; each is handed out after it has run. Raises RequestError for a plan that cannot be."""
    then = [[list(answer) for answer in outputs] for outputs in schedule.outputs]
    seen = [[0] * len(outputs) for outputs in schedule.outputs]
    for plan, failed in schedule.plans():
        names = {seq: schedule.name_of(seq) for seq in schedule.sequences}
        step = ReplayedStep(plan, names)
        try:
            result = executor.run(plan)
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
            schedule.grow(sampled.seq, len(tokens))
            number, index = schedule.sequences[sampled.seq].place
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
