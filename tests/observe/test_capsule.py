"""A capsule holds the schedule as it was, to the last number, and one that was tampered with is
refused, not run.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from martlet.cache.pages import PagePool
from martlet.engine.assemble import assemble
from martlet.errors import FormatError, MartletError, RequestError
from martlet.observe import capsule as capsule_module
from martlet.observe.capsule import CapsuleWriter, params_row, read_capsule
from martlet.observe.capsule_replay import Schedule, differences, replay, replay_options, verdict
from martlet.ops.interface import StepLimits
from martlet.runtime.plan_codec import PlanLimits
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import ScriptedExecutor
from martlet.types import Added, Copy, Load, Request, Save, Span, Started, StepPlan, StepResult
from tests.speculate.test_drafts import Guesser, token

PAGE, CONTEXT, N_PAGES, VOCAB = 4, 32, 10, 64
HEADER: dict[str, Any] = {
    "martlet_capsule": 2,
    "version": "1",
    "model": {"file": "m.gguf", "fingerprint": "f"},
    "machine": {"kernels": "k"},
    "settings": {"backend": "null", "threads": 2, "seed": 5, "chat_template": "x", "kv_disk": None},
}
STEP = StepLimits(8, 4, 12, CONTEXT // PAGE, layered_rows=2)
LIMITS = PlanLimits(STEP, VOCAB, CONTEXT, N_PAGES, PAGE, 2)


def script(seq: Started, number: int) -> int:
    return (7 * int(seq.request.request_id) + number + seq.index) % VOCAB


class Failing(ScriptedExecutor):
    """Raises in one step."""

    at: int | None = None

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        result = super().run(plan, started)
        if plan.step == self.at:
            raise ArithmeticError("the machine is on fire")
        return result


def request(name: str, n_prompt: int, max_tokens: int, **params: Any) -> Request:
    return Request(name, tuple(range(1, n_prompt + 1)), SamplingParams(max_tokens=max_tokens, seed=1, **params))


def record(path: Path, *, fail_at: int | None = None) -> tuple[dict[str, Any], list[StepPlan]]:
    """Requests that are batched, chunked, preempted, aborted, stopped and that come late; the
    capsule and the plans.
    """
    pool = PagePool(N_PAGES, PAGE)
    executor = Failing(script, PAGE)
    executor.at = fail_at
    scheduler = Scheduler(pool, SchedulerLimits(CONTEXT, 8, 4, 12), frozenset())
    engine = assemble(scheduler, executor, pool, observers=[CapsuleWriter(path, HEADER)])

    def step() -> None:
        try:
            engine.step()
        except ArithmeticError as error:
            engine.clear(str(error))

    engine.add(request("0", 11, 14))
    engine.add(request("1", 5, 16, n=2))
    for _ in range(6):
        step()
    engine.add(request("2", 3, 9, prompt_logprobs=1))
    engine.add(request("3", 3, 9))
    for _ in range(4):
        step()
    engine.abort("3")
    engine.stop("1", 0, "stop")
    while engine.has_work:
        step()
    engine.add(request("4", 2, 4))
    while engine.has_work:
        step()
    engine.close()
    return read_capsule(path), executor.plans


def play(capsule: dict[str, Any], fail_at: int | None = None) -> tuple[list[Any], list[StepPlan]]:
    executor = Failing(script, PAGE)
    executor.at = fail_at
    return list(replay(capsule, executor, Schedule(capsule, LIMITS))), executor.plans


def shape(plan: StepPlan) -> Any:
    """A plan in a form to compare: requests have other names in a capsule."""
    added = [(new.seq, new.index, new.adapter) for new in plan.added]
    spans = [(s.seq, s.start, s.count, s.new_pages, s.n_logits, s.first_page if s.new_pages else 0) for s in plan.spans]
    return plan.step, spans, added, plan.dropped, plan.preempted, plan.saves, plan.loads, plan.copies


def test_the_plans_are_the_recorded_ones(tmp_path: Path) -> None:
    capsule, plans = record(tmp_path / "c.json")
    steps, again = play(capsule)
    assert [shape(plan) for plan in again] == [shape(plan) for plan in plans]
    assert not [step.differ for step in steps if step.differ]
    assert [request["finish"] for request in capsule["requests"]] == [
        ["length"],
        ["stop", "length"],
        ["length"],
        ["abort"],
        ["length"],
    ]
    assert capsule["requests"][2]["step"] == 7
    assert "all as recorded" in verdict(capsule, 0, "c.json")


def test_decode_steps_take_no_room(tmp_path: Path) -> None:
    """Thirty steps of one sequence are a few rows: those that change pages, and a number for the
    others.
    """
    pool = PagePool(N_PAGES, PAGE)
    scheduler = Scheduler(pool, SchedulerLimits(CONTEXT, 8, 4, 12), frozenset())
    engine = assemble(
        scheduler, ScriptedExecutor(script, PAGE), pool, observers=[CapsuleWriter(tmp_path / "c.json", HEADER)]
    )
    engine.add(request("0", 1, 31))
    while engine.has_work:
        engine.step()
    engine.close()
    steps = read_capsule(tmp_path / "c.json")["steps"]
    assert sum(step if isinstance(step, int) else 1 for step in steps) == 31
    assert len(steps) <= 2 * (CONTEXT // PAGE)


@pytest.mark.parametrize("seed", range(3))
def test_guesses_are_replayed(tmp_path: Path, seed: int) -> None:
    """The replay guesses nothing: drafts are in the plans. The executor looks what is in their
    pages.
    """
    pool, guesser = PagePool(40, PAGE), Guesser(0.8, random.Random(seed))
    scheduler, executor = Scheduler(pool, SchedulerLimits(CONTEXT, 16, 4, 20)), ScriptedExecutor(token, PAGE)
    engine = assemble(
        scheduler, executor, pool, observers=[CapsuleWriter(tmp_path / "c.json", HEADER)], drafter=guesser
    )
    guesser.seqs = scheduler._live
    for name in range(3):
        engine.add(request(str(name), 3 + name, 20, draft_tokens=9))
    while engine.has_work:
        engine.step()
    engine.close()
    assert engine.totals.speculation.n_accepted > 10
    again = ScriptedExecutor(token, PAGE)
    limits_then = PlanLimits(StepLimits(16, 4, 20, CONTEXT // PAGE), 99, CONTEXT, 40, PAGE, 2)
    capsule = read_capsule(tmp_path / "c.json")
    assert not [step.differ for step in replay(capsule, again, Schedule(capsule, limits_then)) if step.differ]
    assert [span.draft for plan in again.plans for span in plan.spans] == [
        span.draft for plan in executor.plans for span in plan.spans
    ]


def test_a_token_that_differs_is_found(tmp_path: Path) -> None:
    capsule, _ = record(tmp_path / "c.json")
    capsule["requests"][1]["outputs"][1][3] = 63
    steps, _ = play(capsule)
    [(seq, now, then)] = [found for step in steps for found in step.differ]
    assert then == 63
    assert now == (7 + 3 + 1) % VOCAB
    assert "1 of" in verdict(capsule, 1, "c.json")
    del seq


def test_a_step_that_failed_is_in_it(tmp_path: Path) -> None:
    """What a step that raised was about to do is what one wants to see; it fails again in the same
    place.
    """
    capsule, plans = record(tmp_path / "c.json", fail_at=5)
    steps, again = play(capsule, fail_at=5)
    assert [shape(plan) for plan in again] == [shape(plan) for plan in plans]
    assert [(step.plan.step, step.error) for step in steps if step.error] == [(5, "the machine is on fire")]
    with pytest.raises(ArithmeticError):
        play(capsule, fail_at=4)  # one that had not failed


def test_a_long_recording_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsule_module, "_MOST_NUMBERS", 150)
    with pytest.warns(RuntimeWarning, match="ends at step"):
        capsule, plans = record(tmp_path / "c.json")
    steps, again = play(capsule)
    assert 0 < len(again) < len(plans)
    assert [shape(plan) for plan in again] == [shape(plan) for plan in plans[: len(again)]]
    assert not [step.differ for step in steps if step.differ]
    assert "ends before" in verdict(capsule, 0, "c.json")


def test_parameters_come_back(tmp_path: Path) -> None:
    params = SamplingParams(
        temperature=0.5, logit_bias={7: -1.5}, stop=("a", "b"), stop_token_ids=(3,), bad_words=("x",), logprobs=2
    )
    assert SamplingParams.from_dict(json.loads(json.dumps(params_row(params)))) == params
    assert params_row(SamplingParams()) == {}


def test_differences_are_named() -> None:
    same = copy.deepcopy(HEADER)
    assert differences(HEADER, same) == ([], [])
    other = {**same, "version": "2", "model": {"file": "o.gguf", "fingerprint": "g"}, "machine": {"kernels": "l"}}
    grave, light = differences({**HEADER, "settings": {"seed": 1, "magic": 2}}, other)
    assert "not known here: magic" in light[2]
    assert "'m.gguf'" in grave[0]
    assert "'o.gguf' has another fingerprint" in grave[0]
    assert "version '1'" in light[0]
    assert "kernels 'k'" in light[1]


def test_settings_that_reach_the_runner() -> None:
    assert replay_options(HEADER, "/tmp/x") == {"backend": "null", "threads": 2, "seed": 5, "draft": "off"}
    disk = {**HEADER, "settings": {"kv_disk": "/home/somebody", "kv_disk_size": 9}}
    assert replay_options(disk, "/tmp/x") == {"kv_disk": "/tmp/x", "kv_disk_size": 9, "draft": "off"}


@pytest.mark.parametrize(
    "request_row",
    [
        {"id": "0", "prompt_ids": [VOCAB], "params": {}, "outputs": [[]]},
        {"id": "0", "prompt_ids": [], "params": {}, "outputs": [[]]},
        {"id": "0", "prompt_ids": [1], "params": {"n": 2}, "outputs": [[]]},
        {"id": "0", "prompt_ids": [1], "params": {"tempature": 1}, "outputs": [[]]},
        {"id": "0", "prompt_ids": [1], "params": {"logit_bias": {"99": 1}}, "outputs": [[]]},
        {"id": 0, "prompt_ids": [1], "params": {}, "outputs": [[]]},
        {"id": "0", "prompt_ids": [1], "params": {}, "outputs": [[True]]},
        {"id": "0", "prompt_ids": [1], "params": {}, "outputs": [[]], "answered": 2},
        {"id": "0", "prompt_ids": [1], "params": {}, "outputs": [[]], "adapter": "abc"},
        "hello",
    ],
)
def test_a_hostile_request_is_refused(request_row: Any) -> None:
    with pytest.raises(RequestError):
        Schedule({**HEADER, "requests": [request_row], "steps": []}, LIMITS)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] if not items else [leaf for key, entry in items for leaf in leaves(entry, (*path, key))]


def test_no_change_of_a_number_gets_past_the_checks(tmp_path: Path) -> None:
    """Whatever one number becomes, the capsule runs within its limits (the executor asserts that)
    or is refused.
    """
    capsule, _ = record(tmp_path / "c.json")
    body = {"requests": capsule["requests"], "steps": capsule["steps"]}
    places = leaves(body)
    numbers = random.Random(5)
    refused = 0
    for place in numbers.sample(places, min(len(places), 250)):
        changed = copy.deepcopy(capsule)
        target: Any = changed
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = numbers.choice([-1, 0, 1, 3, 10, 1 << 20, 1 << 70, None, "x", [], {}, 0.5])
        try:
            for plan, _, _ in Schedule(changed, LIMITS).plans():
                assert all(0 <= page < N_PAGES for span in plan.spans for page in span.new_pages)
                assert plan.n_tokens <= 8
                assert len(plan.spans) <= 4
        except MartletError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a capsule"),
        ("[]", "does not say"),
        ('{"martlet_capsule": 1, "version": "0.1"}', "replay it with the version that recorded it"),
        ('{"martlet_capsule": 2, "model": {}}', "'machine' is NoneType"),
        ("[" * 100_000, "not a capsule"),
    ],
)
def test_what_is_no_capsule(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_capsule(tmp_path / "c.json")


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        CapsuleWriter(tmp_path / "nowhere" / "c.json", HEADER)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (StepPlan, "step spans added dropped preempted saves loads copies"),
        (Span, "seq start count ids new_pages n_logits first_page n_draft first_layer stop_layer"),
        (Added, "seq request_id index adapter"),
        (Save, "page slot key parent ids"),
        (Load, "slot page key"),
        (Copy, "source target"),
    ],
)
def test_nothing_of_a_plan_is_left_out(kind: Any, known: str) -> None:
    """A new field of a plan has to be recorded and replayed: then add it here."""
    assert {field.name for field in fields(kind)} == set(known.split())
