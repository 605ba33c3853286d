"""The offline API over a scripted model: what goes in, what comes out, and what happens when it is
cut short.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from martlet.config import Origin
from martlet.errors import MartletError, RequestError
from martlet.sampling_params import SamplingParams
from martlet.toy import END, ScriptedExecutor, scripted_llm, spell
from martlet.types import Started, StepPlan, StepResult


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, **given})


def test_a_string_gives_one_answer() -> None:
    with scripted_llm(spell("Hello there")) as llm:
        [output] = llm.generate("Hi", params())
    [answer] = output.outputs
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hi", [72, 105], True)
    assert answer.text == "Hello there"
    assert answer.token_ids == [*b"Hello there", END]
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs) == ("stop", None, None)


def test_prompts_of_every_kind_in_their_order() -> None:
    with scripted_llm(lambda seq, number: seq.request.prompt_ids[0] if number < seq.n_prompt else END) as llm:
        outputs = llm.generate(
            ["a", {"prompt": "bbb"}, {"prompt_token_ids": [99, 99]}, [100], {"prompt": "e", "prompt_token_ids": [101]}],
            params(),
        )
        assert [output.outputs[0].text for output in outputs] == ["a", "bbb", "cc", "d", "e"]
        assert [output.prompt for output in outputs] == ["a", "bbb", None, None, "e"]
        assert llm.generate([102, 102], params())[0].outputs[0].text == "ff"
        assert llm.generate([], params()) == []


def test_one_params_a_prompt() -> None:
    with scripted_llm(spell("abcdef")) as llm:
        outputs = llm.generate(["x", "y"], [params(max_tokens=2), params(max_tokens=4)])
        assert [output.outputs[0].text for output in outputs] == ["ab", "abcd"]
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
        with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
            llm.generate(["x", "y"], [params()])


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "a"},
        {},
        {"prompt": 5},
        {"prompt_token_ids": "abc"},
        [[257]],
        [[-1]],
        [[1.5]],
        [[True]],
        [b"abc"],
        [None],
    ],
)
def test_prompts_that_are_wrong(prompt: Any) -> None:
    """fault SRV-19: a token id outside the vocabulary, and other things that are no prompt."""
    with scripted_llm(spell("ok")) as llm:
        with pytest.raises(RequestError):
            llm.generate(prompt, params())
        assert llm.generate("x", params())[0].outputs[0].text == "ok"


def test_a_prompt_beyond_the_context_is_refused_before_any_runs() -> None:
    """fault CTX-01"""
    with scripted_llm(spell("ok"), context=64) as llm:
        with pytest.raises(RequestError, match=r"100 tokens.*64") as caught:
            llm.generate(["x", "y" * 100], params())
        assert caught.value.code == "context_length_exceeded"
        assert not llm._parts.engine.has_work
        assert llm.generate("x", params())[0].outputs[0].text == "ok"


def test_a_full_context_ends_with_length() -> None:
    """fault CTX-05"""
    with scripted_llm(lambda seq, number: 97, context=64) as llm:
        [output] = llm.generate("x" * 10, params(max_tokens=None))
    assert len(output.outputs[0].token_ids) == 54
    assert output.outputs[0].finish_reason == "length"


def test_n_answers() -> None:
    with scripted_llm(lambda seq, number: 97 + seq.index if number < 2 else END) as llm:
        [output] = llm.generate("x", params(n=3))
    assert [(answer.index, answer.text) for answer in output.outputs] == [(0, "aa"), (1, "bb"), (2, "cc")]


@pytest.mark.parametrize(
    ("text", "stop", "include", "expected", "reason"),
    [
        ("ABC DEFGHIJ KL", ["DEFGHIJ"], False, "ABC ", "DEFGHIJ"),  # fault DET-07
        ("foo\n\nbar", ["\n\n"], False, "foo", "\n\n"),  # fault DET-09
        ("xabc", ["abc", "b"], False, "xa", "b"),  # fault DET-09: the one that is complete first
        ("one END two", ["END"], True, "one END", "END"),
        ("no stop here", ["zzz"], False, "no stop here", None),
        ("ends in EN", ["END"], False, "ends in EN", None),
    ],
)
def test_stop_strings(text: str, stop: list[str], include: bool, expected: str, reason: str | None) -> None:
    with scripted_llm(spell(text)) as llm:
        given = params(stop=stop, include_stop_str_in_output=include)
        [output] = llm.generate("x", given)
        assert output.outputs[0].text == expected
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", reason)
        stream = llm.stream("x", given)
        assert "".join(stream) == expected
        assert not llm._parts.engine.has_work


def test_a_stop_string_ends_one_of_n_only() -> None:
    with scripted_llm(lambda seq, number: b"ab"[seq.index] if number < 5 else END) as llm:
        [output] = llm.generate("x", params(n=2, stop=["aa"]))
    assert [(answer.text, answer.stop_reason) for answer in output.outputs] == [("", "aa"), ("bbbbb", None)]


def test_stop_token() -> None:
    with scripted_llm(spell("abc.def")) as llm:
        [output] = llm.generate("x", params(stop_token_ids=[ord(".")]))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", ord("."))


def test_streamed_text_is_the_whole_text_and_never_half_a_character() -> None:
    """fault DET-01"""
    text = "a 👩‍👩‍👧‍👦 é ü 漢字."
    with scripted_llm(spell(text)) as llm, llm.stream("x", params(max_tokens=60)) as stream:
        pieces = list(stream)
        assert stream.result is not None
        assert stream.result.outputs[0].text == "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 5


def test_an_answer_that_ends_inside_a_character() -> None:
    """fault DET-03: the same in both modes."""
    with scripted_llm(spell("a🎉b")) as llm:
        [output] = llm.generate("x", params(max_tokens=3))
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text in ("a", "a\ufffd")
        assert "".join(llm.stream("x", params(max_tokens=3))) == output.outputs[0].text


def test_a_stream_that_is_left_is_aborted() -> None:
    with scripted_llm(lambda seq, number: 97) as llm:
        with llm.stream("x", params(max_tokens=None)) as stream:
            assert next(stream) == "a"
        assert stream.output.outputs[0].finish_reason == "abort"
        assert list(stream) == []
        dropped = llm.stream("x", params(max_tokens=None))
        next(dropped)
        del dropped
        assert not llm._parts.engine.has_work


def test_a_stream_and_a_call_beside_it() -> None:
    with scripted_llm(spell("streamed text")) as llm:
        stream = llm.stream("x", params())
        first = next(stream)
        assert llm.generate("y", params())[0].outputs[0].text == "streamed text"
        assert first + "".join(stream) == "streamed text"


def test_a_stream_has_one_answer() -> None:
    with scripted_llm(spell("x")) as llm:
        with pytest.raises(RequestError, match="n > 1"):
            llm.stream("x", params(n=2))
        assert not llm._parts.engine.has_work


class Interrupting:
    """Presses Ctrl-C in one step."""

    def __init__(self, executor: ScriptedExecutor, step: int) -> None:
        self.executor = executor
        self.step = step

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        result = self.executor.run(plan, started)
        if plan.step == self.step:
            raise KeyboardInterrupt
        return result

    def close(self) -> None:
        self.executor.close()


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("streamed", [False, True])
def test_ctrl_c_aborts_the_request_and_leaves_the_engine_of_use(step: int, streamed: bool) -> None:
    with scripted_llm(spell("abcdefghij"), wrap=lambda executor: Interrupting(executor, step)) as llm:
        with pytest.raises(KeyboardInterrupt):
            _ = list(llm.stream("x", params())) if streamed else llm.generate(["x", "y"], params())
        assert not llm._parts.engine.has_work
        llm._parts.engine.scheduler.check()
        assert llm.generate("x", params())[0].outputs[0].text == "abcdefghij"


def test_an_error_of_one_request_is_its_own() -> None:
    """fault SMP-17"""
    with scripted_llm(
        lambda seq, number: "the logits are NaN" if seq.request.prompt_ids[0] == ord("b") else spell("ok")(seq, number)
    ) as llm:
        good, bad = llm.generate(["a", "b"], params())
        assert (good.outputs[0].text, good.error) == ("ok", None)
        assert (bad.outputs[0].finish_reason, bad.error) == ("error", "the logits are NaN")
        with pytest.raises(MartletError, match="the logits are NaN"):
            list(llm.stream("b", params()))


def test_prompt_logprobs_have_an_entry_a_token() -> None:
    with scripted_llm(spell("ok")) as llm:
        [output] = llm.generate("hello", params(prompt_logprobs=0))
    scored = output.prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert [list(entry) for entry in scored[1:] if entry] == [[ord(letter)] for letter in "ello"]
    assert scored[1] is not None
    assert scored[1][ord("e")].decoded_token == "e"


def test_after_close() -> None:
    llm = scripted_llm(spell("ok"))
    stream = llm.stream("x", params())
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.encode("x"), lambda: next(stream)):
        with pytest.raises(MartletError, match="closed"):
            use()


def test_embeddings_have_length_one() -> None:
    with scripted_llm(spell("ok")) as llm:
        outputs = llm.encode(["abc", "hello"])
        assert [len(output.prompt_token_ids) for output in outputs] == [3, 5]
        for output in outputs:
            assert output.embedding.dtype == np.float32
            assert np.linalg.norm(output.embedding) == pytest.approx(1.0)
        with pytest.raises(RequestError):
            llm.encode({"prompt_token_ids": []})


def test_chat() -> None:
    with scripted_llm(spell("fine")) as llm:
        turn = [{"role": "user", "content": "Hi"}]
        [output] = llm.chat(turn, params())
        assert (output.prompt, output.outputs[0].text) == ("u:Hi;a:", "fine")
        assert output.prompt_token_ids == list(b"u:Hi;a:")
        outputs = llm.chat([turn, [*turn, {"role": "assistant", "content": "Yes"}, *turn]], params())
        assert [output.prompt for output in outputs] == ["u:Hi;a:", "u:Hi;a:Yes;u:Hi;a:"]
        assert "".join(llm.stream_chat(turn, params())) == "fine"
        assert llm.chat_prompt(turn, chat_template="{{ messages[0].content }}!")[0] == "Hi!"
        assert llm.chat_prompt(turn, add_generation_prompt=False)[0] == "u:Hi;"


def test_control_tokens_in_a_message_stay_text() -> None:
    """fault TOK-09"""
    with scripted_llm(spell("fine")) as llm:
        text, ids = llm.chat_prompt([{"role": "user", "content": "x<|end|>"}])
        assert text == "u:x<|end|>;a:"
        assert END not in ids
        assert llm.generate("x<|end|>", params())[0].prompt_token_ids == list(b"x<|end|>")


def test_a_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, the"}]
    with scripted_llm(spell("fine")) as llm:
        assert llm.chat_prompt(messages, continue_final_message=True)[0] == "u:Hi;a:Sure, the"


def test_effective_settings_have_their_origin() -> None:
    """What the model's file suggests holds for what a request leaves open, and says so."""
    with scripted_llm(spell("ok"), suggested={"temperature": 0.7, "top_p": 0.9}) as llm:
        [output] = llm.generate("x", {"temperature": 0.5, "max_tokens": 9})
        found = {setting.name: (setting.value, setting.origin) for setting in output.settings}
        assert found["temperature"] == (0.5, Origin.OPTION)
        assert found["top_p"] == (0.9, Origin.MODEL_FILE)
        assert found["min_tokens"] == (0, Origin.DEFAULT)
        assert llm.get_default_sampling_params().temperature == 0.7
        complete = {s.name: (s.value, s.origin) for s in llm.effective_params(SamplingParams(max_tokens=9))}
        assert complete["top_p"] == (1.0, Origin.DEFAULT)
        with pytest.raises(RequestError, match=r"'temprature'\. Did you mean 'temperature'"):
            llm.generate("x", {"temprature": 1.0})


def test_metrics() -> None:
    with scripted_llm(spell("0123456789")) as llm:
        [output] = llm.generate("abc", params())
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.n_prompt, metrics.n_generated) == (3, 11)
    assert metrics.queue_s is not None
    assert metrics.ttft_s is not None
    assert metrics.finished_s is not None
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.finished_s - metrics.arrival_s


def test_importing_martlet_is_cheap() -> None:
    code = (
        "import sys, martlet; assert not {'numpy', 'numba', 'martlet.llm'} & set(sys.modules);"
        " assert all(getattr(martlet, name).__name__ == name for name in martlet.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
