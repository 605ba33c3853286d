"""Asks 5 and 7, and the oracle, at the command line: in this process, so that the machine can be
another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from martlet import toy
from martlet.cli import main
from martlet.engine.memory import USABLE_SHARE
from martlet.machine import MachineLimits, read_machine
from martlet.ops.cpu.backend import CpuBackend
from martlet.spec import Activation

ANSWER = ("--raw", "--temp", "0", "--ignore-eos", "-n", "20")
SLOW = "martlet: that is slow."

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calling it changes what is read of the machine."""

    def change(**limits: object) -> None:
        found: MachineLimits = replace(read_machine(), **limits)  # type: ignore[arg-type]
        for module in ("machine", "commands.speed"):
            monkeypatch.setattr(f"martlet.{module}.read_machine", lambda: found)

    return change


# -- ask 5: the bound by memory, the share reached, and why it is low ------------------------------
def test_a_run_that_is_fast_enough_says_its_share_only(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    # bytes a second: any run is faster
    monkeypatch.setattr("martlet.commands.speed.bandwidth", lambda threads: 1e4)
    assert main(["run", tiny, "abc", *ANSWER]) == 0
    errors = capsys.readouterr().err
    assert re.search(r"20 generated at [\d,.]+ tok/s, \d{3,}% of the speed at which this machine reads memory", errors)
    assert SLOW not in errors


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"cpu_quota": 1.5, "physical_cores": 2}, "2 threads share a quota of 1.5 CPUs: use --threads 1."),
        ({"cpu_quota": None, "physical_cores": 1}, "2 threads run on 1 physical cores: use --threads 1."),
        ({"cpu_quota": None, "physical_cores": 512}, "2 of 512 physical cores are used: use more --threads."),
    ],
)
def test_a_slow_run_says_the_likely_cause(
    tiny: str,
    limits: dict[str, float | None],
    cause: str,
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    machine(**limits)
    monkeypatch.setattr("martlet.commands.speed.bandwidth", lambda threads: 1e15)
    assert main(["run", tiny, "abc", *ANSWER, "--threads", "2"]) == 0
    errors = capsys.readouterr().err
    assert " 0% of the speed at which this machine reads memory" in errors
    assert f"{SLOW} {cause}" in errors


def test_quiet_says_nothing_of_speed(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("martlet.commands.speed.bandwidth", lambda threads: 1e15)
    assert main(["run", tiny, "abc", *ANSWER, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


# -- ask 7: the sum is shown before anything is allocated ------------------------------------------
def room_for(model: str, tokens: int, capsys: Captured) -> int:
    """Memory that holds the model and `tokens` tokens of context, by the plan's own figures."""
    assert main(["plan", model, "--no-probe", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    fixed = plan["total"] - plan["kv_per_token"] * plan["page_size"] * plan["n_pages"]
    return int((fixed + tokens * plan["kv_per_token"]) / USABLE_SHARE) + 1


@pytest.mark.model
def test_a_context_that_does_not_fit_is_refused_with_the_sum(
    smollm2_path: Path, machine: Callable[..., None], capsys: Captured
) -> None:
    """By hand: 23,040 bytes a token; room for 4,100 is 128 pages of 32; 8,192 tokens are 89.9 MiB
    more than 4,100.
    """
    machine(memory_available=room_for(str(smollm2_path), 4100, capsys))
    assert main(["run", str(smollm2_path), "Hello", "-c", "8192"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "KV 180 MiB" in shown.err
    assert "90 MiB" in shown.err
    assert "set max_context to 4,096 or less" in shown.err
    assert main(["run", str(smollm2_path), "Hello", "-c", "4096", "-n", "1", "-q"]) == 0


def test_without_a_context_what_fits_is_taken(tiny: str, machine: Callable[..., None], capsys: Captured) -> None:
    """By hand: room for 100 tokens is three pages of 32."""
    machine(memory_available=room_for(tiny, 100, capsys))
    assert main(["run", tiny, "abc", *ANSWER, "-v"]) == 0
    assert re.search(r"max_context +96 +\(machine: what fits in memory\)", capsys.readouterr().err)
    assert main(["plan", tiny, "--no-probe", "-c", "256"]) == 0
    assert re.search(r"256 +1 +f16 .* no$", capsys.readouterr().out, re.MULTILINE)


# -- the oracle ------------------------------------------------------------------------------------
def test_oracle_changes_no_answer(tiny: str, capsys: Captured) -> None:
    assert main(["run", tiny, "abc", *ANSWER, "-q"]) == 0
    plain = capsys.readouterr().out
    assert main(["run", tiny, "abc", *ANSWER, "-q", "--oracle"]) == 0
    assert capsys.readouterr().out == plain != ""


def test_oracle_stops_at_the_first_operation_that_is_wrong(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    right = CpuBackend.act_mul
    monkeypatch.setattr(
        CpuBackend, "act_mul", lambda self, **given: right(self, **given | {"activation": Activation.GELU})
    )
    assert main(["run", tiny, "abc", *ANSWER, "-q", "--oracle"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "layer 0, act_mul" in shown.err


# -- notes -----------------------------------------------------------------------------------------
@pytest.mark.model
def test_small_notes_are_for_those_who_ask(smollm2_path: Path, capsys: Captured) -> None:
    """SmolLM2's vocabulary has no tokens for eight control bytes, which hardly anyone needs to
    know.
    """
    run = ["run", str(smollm2_path), "Hello", "-n", "1"]
    assert main(run) == 0
    assert "vocabulary" not in capsys.readouterr().err
    assert main([*run, "--verbose"]) == 0
    assert "no tokens for the bytes 0x04" in capsys.readouterr().err
    assert main(["inspect", str(smollm2_path)]) == 0
    assert "no tokens for the bytes 0x04" in capsys.readouterr().out


def test_a_prompt_may_come_after_options(tiny: str, capsys: Captured) -> None:
    assert main(["tokenize", tiny, "--ids", "ab"]) == 0
    assert capsys.readouterr().out == "97 98\n"


def test_logprobs_without_json_are_refused(tiny: str, capsys: Captured) -> None:
    """Ask 33: they would be computed and shown nowhere."""
    assert main(["run", tiny, "abc", *ANSWER, "--logprobs", "2"]) == 2
    assert "--json" in capsys.readouterr().err
