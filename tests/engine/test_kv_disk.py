"""KV pages that outlive the process: on a real model, with restarts, damage and disks that fail."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

from martlet.errors import CapacityError
from martlet.llm import LLM
from martlet.runtime.disk_file import stored_files
from martlet.runtime.disk_format import Layout
from martlet.sampling_params import SamplingParams

pytestmark = pytest.mark.model
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=16, logprobs=2, ignore_eos=True)
STORY = "In a small village by the sea there lived an old fisherman who had never learned to swim. " * 8
CONTEXT = 1024
CHAT = """
    import json, sys
    from martlet import LLM, SamplingParams
    llm = LLM({model!r}, kv_disk={folder!r}, max_context={context}, threads=1)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=2, ignore_eos=True)
    messages = []
    for question in ({story!r}, "Why not?", "And then?"):
        messages.append({{"role": "user", "content": question}})
        [output] = llm.chat(messages, params)
        messages.append({{"role": "assistant", "content": output.outputs[0].text}})
        print(json.dumps(messages), flush=True)
    for piece in llm.stream_chat([*messages, {{"role": "user", "content": "Go on."}}], params):
        print(json.dumps(piece), flush=True)
"""


def said(output: Any) -> Any:
    """All of an answer that only equal bits make equal."""
    return [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs]


def asked(llm: LLM, prompt: str, params: SamplingParams = PARAMS) -> tuple[Any, int]:
    """The answer, and how many prompt tokens came from disk."""
    [output] = llm.generate(prompt, params)
    assert output.metrics is not None
    return said(output), output.metrics.n_loaded


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Any:
    """The answer to STORY without a tier."""
    with LLM(str(smollm2_path), max_context=CONTEXT, prefix_cache=False) as llm:
        return asked(llm, STORY)[0]


def opened(path: Path, folder: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"max_context": CONTEXT, "kv_disk": str(folder), **options})


def test_a_chat_goes_on_after_kill_9(smollm2_path: Path, tmp_path: Path) -> None:
    """Row 15 of what users ask for: killed in the middle of an answer, the next process computes
    the new text only.
    """
    code = textwrap.dedent(CHAT).format(model=str(smollm2_path), folder=str(tmp_path), context=CONTEXT, story=STORY)
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    messages = [json.loads(first.stdout.readline()) for _ in range(3)][-1]
    first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert len(messages) == 6
    messages.append({"role": "user", "content": "Tell me more."})
    with opened(smollm2_path, tmp_path) as llm:  # with another number of threads
        [output] = llm.chat(messages, PARAMS)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.n_loaded >= 200
    # the page that was not full, and the new text
    assert metrics.n_prompt - metrics.n_cached <= 32 + 20
    with LLM(str(smollm2_path), max_context=CONTEXT, prefix_cache=False) as llm:
        [expected] = llm.chat(messages, PARAMS)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert said(output) == said(expected)


def test_closing_keeps_what_was_computed(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    with opened(smollm2_path, tmp_path) as llm:
        assert asked(llm, STORY) == (plain, 0)
        n_prompt = len(llm.get_tokenizer().encode(STORY))
    with opened(smollm2_path, tmp_path) as llm:
        answer, n_loaded = asked(llm, STORY)
    assert answer == plain
    assert n_loaded == (n_prompt - 1) // 32 * 32
    [file] = stored_files(tmp_path)
    owner, records = file.read()
    assert owner is not None
    assert "smollm2" in owner.model.lower()
    assert len(records) == (n_prompt + 15) // 32


def test_damage_on_disk_costs_time_only(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    with opened(smollm2_path, tmp_path) as llm:
        asked(llm, STORY)
    [file] = stored_files(tmp_path)
    owner, records = file.read()
    assert owner is not None
    layout = Layout(owner.page_size, owner.page_bytes)
    with open(file.path, "r+b") as data:
        data.seek(layout.page_at(records[2].slot) + owner.page_bytes // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 4]))
    with opened(smollm2_path, tmp_path) as llm:
        with pytest.warns(RuntimeWarning, match="damaged page"):
            answer, n_loaded = asked(llm, STORY)
        assert answer == plain
        assert n_loaded == 2 * 32  # what stands before the damage
    with opened(smollm2_path, tmp_path) as llm:
        answer, n_loaded = asked(llm, STORY)  # it was computed, and kept again
        assert answer == plain
        assert n_loaded > 3 * 32


def test_a_file_cut_under_a_running_engine(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    with opened(smollm2_path, tmp_path) as llm:
        asked(llm, STORY)
    with opened(smollm2_path, tmp_path) as llm:
        os.truncate(next(tmp_path.glob("*.kv")), 4096)
        with pytest.warns(RuntimeWarning, match="damaged page"):
            assert asked(llm, STORY) == (plain, 0)


def test_a_full_disk_costs_time_only(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    """There is room for three pages."""
    size = Layout(32, 30 * 2 * 3 * 64 * 32 * 2).page_at(3) + 5000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(smollm2_path, tmp_path) as llm:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            with pytest.warns(RuntimeWarning, match="no room for more KV pages"):
                assert asked(llm, STORY) == (plain, 0)
            asked(llm, "Another text. " * 40)
            assert asked(llm, STORY)[0] == plain
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with opened(smollm2_path, tmp_path) as llm:
        answer, n_loaded = asked(llm, STORY)
    assert answer == plain
    assert n_loaded <= 3 * 32


def test_a_folder_that_is_a_file_costs_time_only(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.warns(RuntimeWarning, match="not kept on disk"),
        LLM(str(smollm2_path), max_context=CONTEXT, kv_disk=str(tmp_path / "file")) as llm,
    ):
        assert asked(llm, STORY) == (plain, 0)


def test_two_engines_on_one_folder(smollm2_path: Path, tmp_path: Path, plain: Any) -> None:
    with opened(smollm2_path, tmp_path) as one, opened(smollm2_path, tmp_path) as other:
        assert asked(one, STORY) == (plain, 0)
        assert asked(other, STORY) == (plain, 0)
    assert len(stored_files(tmp_path)) == 2
    with opened(smollm2_path, tmp_path) as one:
        assert asked(one, STORY)[1] > 0


def test_salts_and_precisions_stay_apart(smollm2_path: Path, tmp_path: Path) -> None:
    """Fault KVC-05, also over a restart."""
    from martlet.types import Scheduling

    def loaded(llm: LLM, salt: str) -> int:
        [output] = llm.generate(STORY, PARAMS, scheduling=Scheduling(cache_salt=salt))
        assert output.metrics is not None
        return output.metrics.n_loaded

    with opened(smollm2_path, tmp_path) as llm:
        assert loaded(llm, "a") == 0
    with opened(smollm2_path, tmp_path) as llm:
        assert loaded(llm, "b") == 0
        assert loaded(llm, "") == 0
        assert loaded(llm, "a") > 0
    with opened(smollm2_path, tmp_path, kv_dtype="f32") as llm:
        assert loaded(llm, "a") == 0
    assert len(stored_files(tmp_path)) == 2


def test_a_size_below_one_page_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"kv_disk_size is 700,000 bytes.*one page takes 737,280"):
        opened(smollm2_path, tmp_path, kv_disk_size=700_000)


def test_no_warning_where_all_is_well(smollm2_path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(smollm2_path, tmp_path) as llm:
            asked(llm, STORY)
