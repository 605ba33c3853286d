"""The offline API: a model in, text out, without a server (read `engine/engine.py` next, which it drives).

    from martlet import LLM, SamplingParams

    with LLM("model.gguf") as llm:
        [answer] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
        print(answer.outputs[0].text)

Names follow vLLM's offline API. Threads may share an LLM: they take turns, a step at a time, and a step serves all of
them, so a thread that waits for its answer drives the others' as well.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from martlet.config import EngineConfig, Setting, resolve_config
from martlet.engine.build import Built, Progress, build
from martlet.engine.engine import Engine
from martlet.engine.outputs import CompletionOutput, EmbeddingOutput, OutputBuilder, RequestOutput
from martlet.engine.params import ParamsLike, params_each, resolve_params
from martlet.engine.plan import MemoryPlan
from martlet.engine.prompts import (
    ChatOptions,
    Message,
    Prompt,
    check_chat_options,
    conversations,
    listed,
    tokens_of,
    truncated,
)
from martlet.errors import MartletError, RequestError
from martlet.metrics import StartPhase
from martlet.sampling_params import SamplingParams
from martlet.tokenizer.chat import ChatTemplate
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import Event, Request

__all__ = [
    "LLM",
    "ChatOptions",
    "CompletionOutput",
    "EmbeddingOutput",
    "LLMOptions",
    "Message",
    "Prompt",
    "RequestOutput",
    "Stream",
]


class LLMOptions(TypedDict, total=False):
    """The options of `LLM`; None is "not given". `config.py` says what each means and where its default comes from."""

    threads: int | None
    max_context: int | None
    kv_dtype: str | None
    kv_memory: int | None
    backend: str | None
    max_step_tokens: int | None
    max_seqs: int | None
    seed: int | None
    offline: bool | None
    oracle: bool | None
    chat_template: str | None
    tokenizer_pre: str | None
    trace: str | None
    capsule: str | None


class LLM:
    """A loaded model. Use it as a context manager, or call `close`, to free it."""

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Unpack[LLMOptions]) -> None:
        """Load `model`: a GGUF file, a Hugging Face folder, or a name of the catalogue, which is fetched if it is not here.

        `progress` is called with (phase, done, in all).

        Raises RequestError for an option that is wrong, FormatError or UnsupportedError for a file that is, and
        CapacityError if the memory cannot hold the model and its context.
        """
        self._built: Built | None = build(_located({"model": model, **options}, progress), progress)
        self._numbers = itertools.count()
        self._builders: dict[str, OutputBuilder] = {}
        self._lock = threading.Lock()  # held by whoever is in the engine
        self._left: deque[OutputBuilder] = deque()  # of streams that were collected meanwhile: to be aborted

    # -- what was decided at the start -----------------------------------------------------------------------------
    @property
    def config(self) -> EngineConfig:
        """Every setting with its origin."""
        return self._parts.config

    @property
    def engine(self) -> Engine:
        """The engine below, for who drives it step by step; not while other threads use this LLM."""
        return self._parts.engine

    @property
    def plan(self) -> MemoryPlan:
        """What the memory is used for."""
        return self._parts.plan

    @property
    def start_timeline(self) -> tuple[StartPhase, ...]:
        """How long each part of the start took."""
        return self._parts.start

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's file, or an option, brings a chat template; else a fallback is used."""
        return not self._parts.template.is_fallback

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user of this model should know: a guessed tokenizer, a fallback chat template."""
        return self._parts.warnings

    @property
    def chat_template_note(self) -> str | None:
        """What to say where the chat template is a fallback; None if the model has its own."""
        return self._parts.template.note

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters for calls that give none: the model file's suggestions over the defaults."""
        return resolve_params(None, self._parts.suggested)[0]

    def effective_params(self, sampling_params: ParamsLike = None) -> tuple[Setting, ...]:
        """The sampling parameters that a call would use, with the origin of each."""
        return resolve_params(sampling_params, self._parts.suggested)[1]

    # -- work ------------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; the answers are in the order of the prompts.

        `sampling_params` is one for all or one a prompt. A SamplingParams is used as it is; a mapping sets some fields
        and leaves the others to the model's file; None leaves all. `use_tqdm` shows a progress bar. Raises RequestError
        if any prompt cannot run, before any has.
        """
        tokens = [tokens_of(prompt, self._parts.tokenizer) for prompt in listed(prompts)]
        return self._complete(tokens, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        use_tqdm: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written with the model's chat template."""
        prompts = [self.chat_prompt(conversation, **options) for conversation in conversations(messages)]
        return self._complete(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: ParamsLike = None) -> Stream:
        """Complete one prompt piece by piece: iterate over the text, then read `result`."""
        return self._start_stream(tokens_of(prompt, self._parts.tokenizer), sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: ParamsLike = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Answer one conversation piece by piece."""
        return self._start_stream(self.chat_prompt(messages, **options), sampling_params)

    def encode(self, prompts: Prompt | Sequence[Prompt]) -> list[EmbeddingOutput]:
        """Embed prompts: the mean, over all tokens, of what the final norm gives, scaled to length 1."""
        outputs = []
        for prompt in listed(prompts):
            text, ids = tokens_of(prompt, self._parts.tokenizer)
            if not ids:
                raise RequestError("The prompt has no tokens; give at least one.", param="prompt")
            with self._lock:
                mean = self._parts.engine.embed(ids)
            length = float(np.linalg.norm(mean.astype(np.float64)))
            embedding = mean if length == 0.0 else (mean / length).astype(np.float32)
            outputs.append(EmbeddingOutput(self._new_id(), text, list(ids), embedding))
        return outputs

    def close(self) -> None:
        """Free the model, its KV pages and its threads. Idempotent."""
        with self._lock:
            built, self._built = self._built, None
            self._builders = {}
            if built is not None:
                built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # -- parts -----------------------------------------------------------------------------------------------------
    @property
    def _parts(self) -> Built:
        if self._built is None:
            raise MartletError("This LLM is closed; make a new one.")
        return self._built

    def _new_id(self) -> str:
        return str(next(self._numbers))

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[str, list[int]]:
        """The prompt that a conversation becomes: its text and its ids. Control tokens in a message stay plain text."""
        parts = self._parts
        check_chat_options(options)
        source = options.get("chat_template")
        template = parts.template if source is None else ChatTemplate(source, parts.tokenizer)
        continued = bool(options.get("continue_final_message"))
        rendered = template.render(
            messages,
            tools=options.get("tools"),
            add_generation_prompt=options.get("add_generation_prompt"),
            continue_final_message=continued,
            **(options.get("chat_template_kwargs") or {}),
        )
        return rendered.text, template.prompt_ids(rendered)

    def _start(self, prompt: tuple[str | None, Sequence[int]], params: ParamsLike) -> OutputBuilder:
        parts = self._parts
        resolved, settings = resolve_params(params, parts.suggested)
        text, ids = prompt
        request = Request(self._new_id(), truncated(ids, resolved, parts.plan.context), resolved, text)
        with self._lock:
            metrics = parts.engine.add(request)
            builder = OutputBuilder(request, parts.tokenizer, parts.engine.stop, settings)
            builder.output.metrics = metrics
            self._builders[request.request_id] = builder
        return builder

    def _start_stream(self, prompt: tuple[str | None, Sequence[int]], params: ParamsLike) -> Stream:
        builder = self._start(prompt, params)
        if len(builder.output.outputs) > 1:
            self._abandon([builder])
            raise RequestError("A stream has one answer; use generate for n > 1.", param="n")
        return Stream(self, builder)

    def _complete(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: ParamsLike | Sequence[ParamsLike],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        builders: list[OutputBuilder] = []
        try:
            for prompt, params in zip(prompts, params_each(sampling_params, len(prompts)), strict=True):
                builders.append(self._start(prompt, params))
            with _progress_bar(use_tqdm, len(builders)) as show:
                while waiting := sum(not builder.output.finished for builder in builders):
                    self._step()
                    show(len(builders) - waiting)
                show(len(builders))
        except BaseException:  # also Ctrl-C: nobody will read the answers, and the engine is of use again
            self._abandon(builders)
            raise
        return [builder.output for builder in builders]

    def _step(self) -> None:
        with self._lock:
            self._abort_left()
            engine = self._parts.engine
            try:
                self._deliver(engine.step())
            except BaseException as error:  # half a step cannot be finished: every request ends here
                self._deliver(engine.clear(None if isinstance(error, KeyboardInterrupt) else f"a step failed: {error}"))
                raise

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            builder = self._builders.get(event.request_id)
            if builder is not None:
                builder.accept(event)
                if builder.output.finished:
                    del self._builders[event.request_id]

    def _abandon(self, builders: Iterable[OutputBuilder]) -> None:
        self._left.extend(builders)
        with self._lock:
            self._abort_left()

    def _abandon_soon(self, builder: OutputBuilder) -> None:
        """From a finalizer, which may run in the middle of a step: if so, leave it to the next one."""
        self._left.append(builder)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_left()
            finally:
                self._lock.release()

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft().output.request_id
            if request_id in self._builders and self._built is not None:
                self._deliver(self._built.engine.abort(request_id))


class Stream:
    """The text of one answer as it comes. Leaving it early (`close`, or the end of its `with`) aborts the request."""

    def __init__(self, llm: LLM, builder: OutputBuilder) -> None:
        self._llm = llm
        self._builder = builder

    @property
    def output(self) -> RequestOutput:
        """The answer so far."""
        return self._builder.output

    @property
    def result(self) -> RequestOutput | None:
        """The whole answer; None until it is there."""
        return self._builder.output if self._builder.output.finished else None

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._llm._abandon([self._builder])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while True:
            with self._llm._lock:
                text = self._builder.take()
                finished = self._builder.output.finished
            if text:
                return text
            if finished:
                self._builder.raise_error()
                raise StopIteration
            try:
                self._llm._step()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._builder.output.finished:
            self._llm._abandon_soon(self._builder)


def _located(options: Mapping[str, Any], progress: Progress | None) -> EngineConfig:
    """The settings, with a name of the catalogue replaced by the path of its file."""
    config = resolve_config(options)
    if Path(config.model).exists():
        return config
    from martlet.hub import resolve  # only where there is a name to look up

    fetching = None if progress is None else lambda done, total: progress("fetch", done, total)
    return replace(config, model=str(resolve(config.model, offline=config.offline, progress=fetching)))


@contextmanager
def _progress_bar(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    if not show:
        yield lambda done: None
        return
    from rich.progress import Progress as Bar  # only when it is shown: it takes a moment to import

    with Bar() as bar:
        task = bar.add_task("Prompts", total=total)
        yield lambda done: bar.update(task, completed=done)
