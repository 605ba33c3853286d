"""Pages that go to the second tier and come back change nothing, whatever fails on the way: on a
tiny model.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from martlet import LLM, SamplingParams, toy
from martlet.runtime.disk_file import DiskFile
from martlet.sched.budget import WriteBehind
from martlet.sched.cost import CostModel
from martlet.sched.scheduler import Scheduler
from martlet.types import Load, Save, Scheduling

PAGE_BYTES = 32 * 3 * 2 * 2 * 16 * 2  # tokens, layers, keys and values, heads, dimensions, bytes
CONTEXT = 256
N_REQUESTS = 40


def requests() -> list[tuple[list[int], SamplingParams, Scheduling]]:
    """Prompts that begin like one another for some pages and then differ, of two salts."""
    rng = random.Random(4)
    stems = [[rng.randrange(250) for _ in range(200)] for _ in range(5)]
    made = []
    for number in range(N_REQUESTS):
        stem = rng.choice(stems)
        ids = [*stem[: rng.randrange(20, 200)], *(rng.randrange(250) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            max_tokens=rng.randrange(1, 20),
            logprobs=2,
            ignore_eos=True,
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        made.append((ids, params, Scheduling(cache_salt=rng.choice(["", "", "other"]))))
    return made


REQUESTS = requests()


def said(output: Any) -> Any:
    """All of an answer that only equal bits make equal."""
    return (output.prompt_logprobs, [(c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs])


def run(llm: LLM, first: int, stop: int, at_a_time: int) -> tuple[list[Any], int]:
    """Answers to requests first … stop - 1, and how many prompt tokens came from disk."""
    answers, loaded = [], 0
    for start in range(first, stop, at_a_time):
        prompts, params, wishes = zip(*REQUESTS[start : min(stop, start + at_a_time)], strict=True)
        for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, scheduling=wishes):
            answers.append(said(output))
            loaded += output.metrics.n_loaded if output.metrics else 0
        llm._parts.engine.scheduler.check()
    return answers, loaded


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tier") / "tiny.gguf")


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> list[Any]:
    """Each request alone, nothing cached."""
    with LLM(str(tiny_path), threads=1, max_context=CONTEXT, prefix_cache=False) as llm:
        return run(llm, 0, N_REQUESTS, 1)[0]


@pytest.fixture(autouse=True)
def loads_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model as small as this one, computing is nearly always cheaper."""
    monkeypatch.setattr(CostModel, "load_s", lambda self, n_pages: 0.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "four at a time": {"at_a_time": 4},
    "all at once": {"at_a_time": N_REQUESTS},
    "chunks of 7": {"at_a_time": 4, "max_step_tokens": 7, "max_seqs": 4},
    "two threads, a small tier": {"at_a_time": 4, "threads": 2, "kv_disk_size": 12 * 16_384},
    "plenty of memory": {"kv_memory": 500 * PAGE_BYTES},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_pages_that_come_back_are_those_that_went(tiny_path: Path, plain: list[Any], tmp_path: Path, name: str) -> None:
    """A pool of 10 pages, where a request alone may take 8; the process is started anew in the
    middle.
    """
    options = {
        "kv_memory": 10 * PAGE_BYTES,
        "max_context": CONTEXT,
        "threads": 1,
        "kv_disk": str(tmp_path),
        "at_a_time": 1,
    } | OPTIONS[name]
    at_a_time = options.pop("at_a_time")
    with LLM(str(tiny_path), **options) as llm:
        first, some = run(llm, 0, N_REQUESTS // 2, at_a_time)
    with LLM(str(tiny_path), **options) as llm:
        second, more = run(llm, N_REQUESTS // 2, N_REQUESTS, at_a_time)
    assert first + second == plain
    assert more > 0
    assert some > 0 or name in ("plenty of memory", "two threads, a small tier")


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fails_at_random_changes_nothing(
    tiny_path: Path, plain: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    whole = {"save": DiskFile.save, "load": DiskFile.load}
    failed = {"save": 0, "load": 0}

    def save(self: DiskFile, save: Save, page: memoryview) -> bool:
        if rng.random() < 0.05:
            failed["save"] += 1
            return False
        return whole["save"](self, save, page)

    def load(self: DiskFile, load: Load, out: memoryview) -> bool:
        if rng.random() < 0.2:
            failed["load"] += 1
            out[:] = bytes([rng.randrange(256)]) * len(out)
            return False
        return whole["load"](self, load, out)

    monkeypatch.setattr(DiskFile, "save", save)
    monkeypatch.setattr(DiskFile, "load", load)
    options: Any = {"kv_memory": 10 * PAGE_BYTES, "max_context": CONTEXT, "threads": 1, "kv_disk": str(tmp_path)}
    with LLM(str(tiny_path), **options) as llm:
        answers, loaded = run(llm, 0, N_REQUESTS, 3)
    assert answers == plain
    assert loaded > 0
    assert min(failed.values()) > 0


def test_an_embedding_does_not_spoil_what_is_kept(
    tiny_path: Path, plain: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes pages between two steps, whose content must not be saved after that."""
    # nothing is saved beforehand
    monkeypatch.setattr(Scheduler, "flush_plan", lambda self, most: None)
    monkeypatch.setattr(WriteBehind, "most", 0)
    options: Any = {"kv_memory": 10 * PAGE_BYTES, "max_context": CONTEXT, "threads": 1, "kv_disk": str(tmp_path)}
    answers, loaded = [], 0
    with LLM(str(tiny_path), **options) as llm:
        for number in range(N_REQUESTS):
            [answer], n_loaded = run(llm, number, number + 1, 1)
            answers.append(answer)
            loaded += n_loaded
            if number % 3 == 0:
                llm.encode({"prompt_token_ids": [(number + i) % 200 for i in range(240)]})
    assert answers == plain
    assert loaded > 0


def test_without_a_measured_gain_nothing_is_loaded(
    tiny_path: Path, plain: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 29 of what users ask for: a tier that is slower than computing is not used."""
    options: Any = {"max_context": CONTEXT, "threads": 1, "kv_disk": str(tmp_path)}
    with LLM(str(tiny_path), **options) as llm:
        run(llm, 0, N_REQUESTS, 1)
    monkeypatch.setattr(CostModel, "load_s", lambda self, n_pages: 1.0 * n_pages)
    with LLM(str(tiny_path), **options) as llm:
        assert run(llm, 0, N_REQUESTS, 1) == (plain, 0)
