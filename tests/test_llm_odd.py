"""The offline API with odd input: what is wrong is refused by name, and nothing that goes wrong
spoils a later call.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from martlet.config import resolve_config
from martlet.engine.outputs import Logprob, Logprobs
from martlet.errors import MartletError, RequestError
from martlet.llm import LLM, Scheduling
from martlet.sampling_params import SamplingParams
from martlet.toy import ScriptedExecutor, scripted_llm, spell
from martlet.types import Started, StepPlan, StepResult, TokenLogprobs

USER = [{"role": "user", "content": "hi"}]


def params(**changed: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **changed})


@pytest.fixture
def llm() -> LLM:
    return scripted_llm(spell("abcdefghij"))


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["x", ""], {"prompt_token_ids": []}])
def test_a_prompt_without_tokens_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="no tokens") as refused:
        llm.generate(prompt, params())
    assert refused.value.param == "prompt"
    assert not llm._parts.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]], dtype=np.uint16), [[5, 6], [7, 8]]),
        ([[np.int32(3)], np.array([4])], [[3], [4]]),
    ],
)
def test_ids_may_be_numpys(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    outputs = llm.generate(prompts, params())
    assert [output.prompt_token_ids for output in outputs] == ids
    assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)


@pytest.mark.parametrize("prompt", [[True], [np.True_], np.array([1.5]), [[np.int64(-1)]], [257], np.array(3)])
def test_what_is_no_id_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, params())


@pytest.mark.parametrize("messages", [5, USER[0], iter(USER), "hi", b"hi", None, [None], [5], ["hi"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, params())
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"add_generation_promt": True}, "add_generation_promt", "'add_generation_prompt'"),
        ({"add_generation_prompt": "x"}, "add_generation_prompt", "True or False"),
        ({"continue_final_message": 1}, "continue_final_message", "True or False"),
        ({"chat_template": 5}, "chat_template", "text of a template"),
        ({"chat_template": ""}, "chat_template", "text of a template"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "mapping"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs", "mapping"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
    ],
)
def test_a_chat_option_is_honoured_or_refused_by_name(
    llm: LLM, options: dict[str, Any], param: str, words: str
) -> None:
    for call in (llm.chat, llm.stream_chat, lambda messages, _, **given: llm.chat_prompt(messages, **given)):
        with pytest.raises(RequestError, match=words) as refused:
            call(USER, params(), **options)
        assert refused.value.param == param


@pytest.mark.parametrize("name", ["chat_template", "tokenizer_pre"])
@pytest.mark.parametrize("value", ["", 5, b"x", ["x"]])
def test_texts_of_the_engines_options(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        resolve_config({"model": "m", name: value}, environ={})


@pytest.mark.parametrize("threads", ["²", "x", "-1", "1.0", "0"])
def test_threads_of_the_environment(threads: str) -> None:
    with pytest.raises(RequestError) as refused:
        resolve_config({"model": "m"}, environ={"MARTLET_THREADS": threads})
    assert refused.value.param == "threads"


class Failing:
    """Fails in the middle of one step: after its tokens were sampled, or before the executor saw
    the plan.
    """

    def __init__(self, executor: ScriptedExecutor, step: int, before: bool, error: BaseException) -> None:
        self.executor, self.step, self.before, self.error = executor, step, before, error

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        if plan.step == self.step and self.before:
            raise self.error
        seen = tuple(seq_id for seq_id in plan.dropped if seq_id in self.executor._sequences)
        # an executor forgives what it has never seen
        result = self.executor.run(replace(plan, dropped=seen), started)
        if plan.step == self.step:
            raise self.error
        return result

    def embed(self, ids: Any, pages: Any) -> Any:
        return self.executor.embed(ids, pages)

    def close(self) -> None:
        self.executor.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")])
def test_a_step_that_fails_ends_every_request_in_it(error: BaseException) -> None:
    """The tokens of that step are lost: a stream beside the call must not go on as if they had not
    been sampled.
    """
    wrap = lambda executor: Failing(executor, 4, False, error)  # noqa: E731
    with scripted_llm(spell("abcdefghij"), wrap=wrap) as llm:
        stream = llm.stream("s", params())
        assert next(stream) == "a"
        with pytest.raises(type(error)):
            llm.generate(["x", "y"], params())
        if isinstance(error, KeyboardInterrupt):
            assert "".join(stream) == "bc"
            assert stream.output.outputs[0].finish_reason == "abort"
        else:
            assert next(stream) == "bc"
            with pytest.raises(MartletError, match="a step failed: no room"):
                next(stream)
            assert stream.output.outputs[0].finish_reason == "error"
        llm._parts.engine.scheduler.check()
        assert llm.generate("x", params())[0].outputs[0].text == "abcdefghij"


@pytest.mark.parametrize("step", [1, 3])
def test_a_plan_that_nobody_ran_leaves_the_engine_of_use(step: int) -> None:
    wrap = lambda executor: Failing(executor, step, True, KeyboardInterrupt())  # noqa: E731
    with scripted_llm(spell("abcdefghij"), wrap=wrap) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x", "y"], params())
        llm._parts.engine.scheduler.check()
        assert llm.generate("x", params())[0].outputs[0].text == "abcdefghij"


def test_threads_share_an_llm(llm: LLM) -> None:
    """Each gets its own answer, whoever ran the steps."""
    texts: list[Any] = []

    def work(number: int) -> None:
        for _ in range(10):
            if number % 2:
                texts.append("".join(llm.stream("x", params())))
            else:
                texts.extend(output.outputs[0].text for output in llm.generate(["x", "yy"], params()))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert texts == ["abcdefghij"] * 60
    llm._parts.engine.scheduler.check()


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_after_it() -> None:
    """A garbage collection can run anywhere, in the scheduler's loops too."""
    streams: list[Any] = []

    class Collecting(Failing):
        def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
            result = self.executor.run(plan, started)
            if streams:
                cycle = [streams.pop()]
                cycle.append(cycle)
                del cycle
                gc.collect()
            return result

    wrap = lambda executor: Collecting(executor, 0, False, KeyboardInterrupt())  # noqa: E731
    with scripted_llm(spell("abcdefghij"), wrap=wrap) as llm:
        streams.append(llm.stream("s", params()))
        assert llm.generate("x", params())[0].outputs[0].text == "abcdefghij"
        assert not llm._parts.engine.has_work
        llm._parts.engine.scheduler.check()


def test_stop_strings_are_shared_by_n_answers_but_not_their_state() -> None:
    script = lambda seq, number: b"xabc"[(number + seq.index) % 4]  # noqa: E731  # xabcx…, abcxa…, bcxab…
    with scripted_llm(script) as llm:
        outputs = llm.generate("p", params(n=3, stop="bc", max_tokens=9))[0].outputs
    assert [output.text for output in outputs] == ["xa", "a", ""]


def test_scheduling_and_salts_are_checked() -> None:
    """fault KVC-05: an empty salt is refused."""
    with scripted_llm(spell("ok")) as llm:
        for prompt in ({"prompt": "a", "cache_salt": ""}, {"prompt": "a", "cache_salt": 3}):
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt)
            assert caught.value.param == "cache_salt"
        with pytest.raises(RequestError) as caught:
            llm.chat([{"role": "user", "content": "a"}], cache_salt="")
        assert caught.value.param == "cache_salt"
        with pytest.raises(RequestError) as caught:
            llm.generate(["a", "b"], scheduling=[Scheduling()])
        assert caught.value.param == "scheduling"
        with pytest.raises(RequestError) as caught:
            llm.generate("a", scheduling={"priority": 1})  # type: ignore[arg-type]
        assert caught.value.param == "scheduling"
        [output] = llm.generate({"prompt": "a", "cache_salt": "mine"}, scheduling=Scheduling(priority=3))
        assert output.outputs[0].text == "ok"


def test_tools_without_a_template_for_them_are_refused(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match="chat_template") as refused:
            call(USER, params(), tools=[tool])
        assert refused.value.param == "tools"


def test_a_template_variable_without_effect_is_stated(llm: LLM) -> None:
    [output] = llm.chat(USER, params(), chat_template_kwargs={"enable_thinking": False})
    assert output.warnings == ("The chat template reads no variable 'enable_thinking': it has no effect.",)


def test_logprobs_are_a_mapping_with_the_token_first() -> None:
    texts = {5: "a", 7: "b", 9: "c"}
    entry = Logprobs(TokenLogprobs(7, -0.7, 2, ((5, -0.5), (7, -0.7), (9, -2.0))), texts)
    assert list(entry.items()) == [(7, Logprob(-0.7, 2, "b")), (5, Logprob(-0.5, 1, "a")), (9, Logprob(-2.0, 3, "c"))]
    assert len(entry) == 3
    assert 8 not in entry
    assert entry == dict(entry)
    # the token is not among the best
    beside = Logprobs(TokenLogprobs(9, -2.0, 3, ((5, -0.5),)), texts)
    assert (list(beside), len(beside), beside[9].rank) == ([9, 5], 2, 3)
    with pytest.raises(KeyError):
        beside[7]
