"""The command line as a person meets it: processes, streams, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from martlet.cli import COMMANDS, main
from martlet.commands.perplexity import windows


def martlet(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command and wait."""
    return subprocess.run(
        [sys.executable, "-m", "martlet", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def one_line(done: subprocess.CompletedProcess[bytes], status: int) -> str:
    """The single line of an error, and nothing on stdout."""
    assert done.returncode == status, done.stderr
    assert done.stdout == b""
    text = done.stderr.decode()
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


# -- without a model -------------------------------------------------------------------------------
def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2


def test_unknown_command_names_the_nearest() -> None:
    assert "'tokenize'" in one_line(martlet("tokenise"), 2)


def test_unknown_option_is_refused_by_name() -> None:
    """Ask 33: nothing is silently ignored, and no abbreviation is guessed."""
    text = one_line(martlet("version", "--verson"), 2)
    assert "--verson" in text


def test_an_engine_is_built_without_numba() -> None:
    """Compiled kernels need none, and it takes a quarter of a second to import."""
    code = "import sys; import martlet.engine.build; print(sorted({'numba', 'torch', 'martlet.grammar.compile'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_start_imports_nothing_heavy() -> None:
    """Ask 2: the command line's own part of the start."""
    code = "import sys; import martlet.cli; print(sorted({'numpy','numba','rich','typer','jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout.strip() == b"[]"


def test_doctor_states_device_threads_and_rule() -> None:
    """Asks 1 and 4."""
    found = json.loads(martlet("doctor", "--json", MARTLET_THREADS="1").stdout)
    assert found["device"].startswith("cpu")
    assert found["threads"] == "1 (environment: MARTLET_THREADS)"
    assert found["memory"].endswith(("(MemAvailable)", "memory limit)", "memory.max)"))


def test_doctor_reports_a_wrong_environment_variable() -> None:
    assert "MARTLET_THREADS is 'many'" in one_line(martlet("doctor", MARTLET_THREADS="many"), 2)
    assert "MARTLET_ISA is 'sse9'" in one_line(martlet("doctor", MARTLET_ISA="sse9"), 1)


def test_doctor_shows_a_forced_instruction_set() -> None:
    shown = json.loads(martlet("doctor", "--json", MARTLET_ISA="generic").stdout)
    assert shown["kernels for"].startswith("generic (MARTLET_ISA; best: ")


def test_broken_pipe_is_quiet() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "martlet", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_windows_of_a_perplexity() -> None:
    """By hand, llama-perplexity's rule: whole windows only, and the beginning token replaces each
    window's first.
    """
    ids = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert list(windows(ids, 4, None)) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert list(windows(ids, 4, 1)) == [[1, 11, 12, 13], [1, 15, 16, 17]]


# -- with the default model ------------------------------------------------------------------------
@pytest.mark.model
class TestWithModel:
    def test_run_answers(self, smollm2_path: Path) -> None:
        done = martlet("run", str(smollm2_path), "The capital of France is", "--raw", "--temp", "0", "-n", "5")
        assert done.returncode == 0, done.stderr
        assert b"Paris" in done.stdout
        assert b"tok/s" in done.stderr

    def test_run_json_tells_ids_and_origins(self, smollm2_path: Path) -> None:
        """Ask 34."""
        done = martlet("run", str(smollm2_path), "Hello", "--json", "--temp", "0", "-n", "3")
        found = json.loads(done.stdout)
        assert len(found["token_ids"]) == 3
        assert found["finish_reason"] == "length"
        assert found["settings"]["temperature"] == {"value": 0.0, "origin": "option"}
        assert found["settings"]["top_p"]["origin"] in ("default", "model file")

    def test_stdin_and_argument_are_the_same(self, smollm2_path: Path) -> None:
        arguments = ("--raw", "--temp", "0", "-n", "4", "-q")
        from_argument = martlet("run", str(smollm2_path), "Once upon", *arguments)
        from_stdin = martlet("run", str(smollm2_path), "-", *arguments, stdin=b"Once upon")
        assert from_argument.stdout == from_stdin.stdout != b""
        assert from_argument.stderr == b""

    def test_stdin_that_is_not_utf8(self, smollm2_path: Path) -> None:
        text = one_line(martlet("run", str(smollm2_path), stdin=b"caf\xe9 au lait"), 2)
        assert "byte 3" in text
        assert "0xe9" in text

    def test_too_long_a_prompt_is_refused_with_the_numbers(self, smollm2_path: Path) -> None:
        """Ask 35."""
        text = one_line(martlet("run", str(smollm2_path), "word " * 200, "--raw", "-q", "-c", "64"), 2)
        assert "64" in text
        assert "200" in text or "201" in text

    def test_wrong_sampling_value_is_named(self, smollm2_path: Path) -> None:
        assert "temperature" in one_line(martlet("run", str(smollm2_path), "x", "-q", "--temp", "-1"), 2)

    def test_offline_runs(self, smollm2_path: Path) -> None:
        """Ask 39: a path needs no network."""
        done = martlet("run", str(smollm2_path), "Hi", "--offline", "-n", "1", "-q")
        assert done.returncode == 0, done.stderr

    def test_tokenize_special(self, smollm2_path: Path) -> None:
        plain = json.loads(martlet("tokenize", str(smollm2_path), "<|im_end|>", "--json").stdout)
        special = json.loads(martlet("tokenize", str(smollm2_path), "<|im_end|>", "--json", "--special").stdout)
        assert special["ids"] == [2]  # the file's tokenizer.ggml.eos_token_id
        assert len(plain["ids"]) > 1
        assert "".join(plain["pieces"]) == "<|im_end|>"

    def test_inspect_json(self, smollm2_path: Path) -> None:
        found = json.loads(martlet("inspect", str(smollm2_path), "--json").stdout)
        assert found["bytes"] == 98_362_432
        assert len(found["tensors"]) == 272
        assert found["metadata"]["llama.block_count"] == 30

    def test_plan_uses_the_allocators_formula(self, smollm2_path: Path) -> None:
        """Ask 8, by hand: 30 layers × 3 KV heads × 64 × 2 (key, value) × 2 bytes = 23,040 bytes a
        token.
        """
        found = json.loads(martlet("plan", str(smollm2_path), "--no-probe", "--json").stdout)
        assert {p["kv_per_token"] for p in found["plans"] if p["kv_dtype"] == "f16"} == {23_040}
        assert {p["kv_per_token"] for p in found["plans"] if p["kv_dtype"] == "f32"} == {46_080}

    def test_bench_json(self, smollm2_path: Path) -> None:
        done = martlet("bench", str(smollm2_path), "-p", "32", "-n", "8", "-d", "16", "-r", "1", "--json")
        found = json.loads(done.stdout)
        assert found["prefill"]["tokens_per_s"] > 0
        assert 0 < found["roofline"]["share"] < 1.5

    def test_interrupt_ends_a_run(self, smollm2_path: Path) -> None:
        command = [sys.executable, "-m", "martlet", "run", str(smollm2_path), "Count.", "--ignore-eos", "-n", "4000"]
        with started(command) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()

    def test_interrupt_stops_the_answer_and_not_the_chat(self, smollm2_path: Path) -> None:
        command = [sys.executable, "-m", "martlet", "chat", str(smollm2_path), "--ignore-eos", "-n", "3000"]
        with started(command) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"Count to a thousand.\n")
            process.stdin.flush()
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(b"/stats\n/exit\n", timeout=60)
            assert process.returncode == 0
            assert b"[stopped]" in output
            assert b"2 messages" in errors

    def test_idle_engine_uses_no_cpu(self, smollm2_path: Path) -> None:
        """Ask 6: under 1 % of a core over five seconds, with the threads of the team alive."""
        command = [sys.executable, "-m", "martlet", "chat", str(smollm2_path), "-n", "4"]
        with started(command) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"Hi\n")
            process.stdin.flush()
            process.stdout.readline()
            time.sleep(1.0)
            before = cpu_seconds(process.pid)
            time.sleep(5.0)
            used = cpu_seconds(process.pid) - before
            process.communicate(b"/exit\n", timeout=30)
        assert used < 0.05


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that heeds SIGINT, and that does not outlive the test, which would wait for one
    that hangs.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=heed_interrupts) as process:
        try:
            yield process
        finally:
            process.kill()  # has no effect on one that has ended


def heed_interrupts() -> None:
    """In the child: a shell makes what it starts in the background ignore SIGINT, and children
    inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
