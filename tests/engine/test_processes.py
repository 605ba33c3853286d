"""A model in several processes and under signals: forks, two at once, Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from martlet import toy
from martlet.errors import MartletError
from martlet.llm import LLM
from martlet.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_is_told_to_load_the_model_itself(model: str) -> None:
    with LLM(model, threads=2, max_context=64) as llm:
        before = llm.generate("x", GREEDY)[0].outputs[0].token_ids
        child = os.fork()
        if child == 0:  # whatever happens here must not run the rest of the tests
            status = 1
            try:
                signal.alarm(60)
                llm.generate("x", GREEDY)
            except MartletError as error:
                llm.close()
                status = 0 if "spawn" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate("x", GREEDY)[0].outputs[0].token_ids == before


def started(model: str, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "martlet", "run", model, "x", "-q", "--raw", "--ignore-eos", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_an_answer_ends_the_program_without_a_traceback(model: str, number: signal.Signals) -> None:
    with started(model, "-t", "2", "-c", "256", "-n", "240", "--temp", "0") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130, -number)  # 0: it had finished
    assert b"Traceback" not in errors


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_while_loading_leaves_nothing_behind(model: str, error: type[BaseException]) -> None:
    """Ctrl-C in the middle of loading, or a callback that fails."""

    def fail(phase: str, done: int, total: int) -> None:
        raise error

    before = threading.active_count()
    with pytest.raises(error):
        LLM(model, threads=2, max_context=64, progress=fail)
    assert threading.active_count() == before
    with LLM(model, threads=2, max_context=64) as llm:
        assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 6


def test_two_models_in_one_process_do_not_disturb_each_other(model: str) -> None:
    with LLM(model, threads=2, max_context=64) as first, LLM(model, threads=2, max_context=64) as second:
        alone = first.generate("x", GREEDY)[0].outputs[0].token_ids
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda llm=llm: found.append(llm.generate("x", GREEDY)[0].outputs[0].token_ids))
            for llm in (first, second, first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [alone] * 4
