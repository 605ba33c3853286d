"""The offline API: a model in, text out, without a server (read `engine/engine.py` next).

    from martlet import LLM, SamplingParams

    with LLM("model.gguf") as llm:
        [answer] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
        print(answer.outputs[0].text)

Names follow vLLM's offline API. Threads may share an LLM (`engine/driver.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import numpy as np

from martlet.config import EngineConfig, Setting, resolve_config
from martlet.engine.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, search_beams
from martlet.engine.build import Built, Progress, build
from martlet.engine.driver import Driver, Prepared, Stream
from martlet.engine.engine import Engine
from martlet.engine.lora import LoRARequest, chosen_adapter, open_adapter
from martlet.engine.memory import MemoryPlan
from martlet.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from martlet.engine.params import ParamsLike, resolve_params
from martlet.engine.prompts import (
    ChatOptions,
    Message,
    Prompt,
    PromptTokens,
    conversations,
    listed,
    one_each,
    tokens_of,
)
from martlet.engine.requests import RequestMaker, scheduling_of
from martlet.errors import MartletError, RequestError
from martlet.metrics import StartPhase
from martlet.sampling_params import SamplingParams
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import Scheduling

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatOptions",
    "CompletionOutput",
    "EmbeddingOutput",
    "LLMOptions",
    "LoRARequest",
    "Lora",
    "Message",
    "Prompt",
    "RequestOutput",
    "Scheduling",
    "Stream",
]

Lora = LoRARequest | str | None  # an adapter by its name, or one to be loaded under a name


class LLMOptions(TypedDict, total=False):
    """The options of `LLM`, for type checkers; None: not given. docs/options.md explains each."""

    threads: int | None
    max_context: int | None
    kv_dtype: str | None
    kv_memory: int | None
    kv_disk: str | None
    kv_disk_size: int | None
    packed: str | None
    backend: str | None
    max_step_tokens: int | None
    max_seqs: int | None
    lora: Mapping[str, str] | None
    draft: str | None
    policy: str | None
    stall_ms: float | None
    max_waiting: int | None
    max_waiting_tokens: int | None
    seed: int | None
    offline: bool | None
    oracle: bool | None
    prefix_cache: bool | None
    string_limit: int | None
    item_limit: int | None
    exact_turns: bool | None
    chat_template: str | None
    tokenizer_pre: str | None
    trace: str | None
    capsule: str | None


class LLM:
    """A loaded model. Use it as a context manager, or call `close`, to free it."""

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Unpack[LLMOptions]) -> None:
        """Load `model`: a GGUF file, a Hugging Face folder, or a name of the catalogue.

        A model of the catalogue is fetched first if need be. `progress` gets (phase, done, total).

        Raises RequestError for a wrong option, FormatError or UnsupportedError for the file, and
        CapacityError if the memory cannot hold the model and its context.
        """
        self._start(build(_located({"model": model, **options}, progress), progress))

    @classmethod
    def from_built(cls, built: Built) -> LLM:
        """Return an LLM around parts made elsewhere, as by `toy.py`; it closes them."""
        llm = cls.__new__(cls)
        llm._start(built)
        return llm

    def _start(self, built: Built) -> None:
        self._built: Built | None = built
        self._driver = Driver(built.engine, built.tokenizer)
        self._maker: RequestMaker | None = RequestMaker(built)
        self._numbers = itertools.count()

    # -- decided at the start ----------------------------------------------------------------------
    @property
    def config(self) -> EngineConfig:
        """Every setting with its origin."""
        return self._parts.config

    @property
    def engine(self) -> Engine:
        """The engine, to drive it step by step; not while other threads use this LLM."""
        return self._parts.engine

    @property
    def plan(self) -> MemoryPlan:
        """How the memory is divided: weights, activations, KV pages."""
        return self._parts.plan

    @property
    def start_timeline(self) -> tuple[StartPhase, ...]:
        """How long each part of the start took."""
        return self._parts.start

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's file or an option has a chat template; else a fallback is used."""
        return not self._parts.template.is_fallback

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for users of this model: a guessed tokenizer, a fallback chat template."""
        return self._parts.warnings

    @property
    def chat_template_note(self) -> str | None:
        """A note on a fallback chat template; None if the model has its own."""
        return self._parts.template.note

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._parts.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any: the model file's suggestions over the defaults."""
        return resolve_params(None, self._parts.suggested)[0]

    def effective_params(self, sampling_params: ParamsLike = None) -> tuple[Setting, ...]:
        """The sampling parameters that a call would use, with the origin of each."""
        return resolve_params(sampling_params, self._parts.suggested)[1]

    # -- work --------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; the answers are in the order of the prompts.

        `sampling_params` are for all prompts, or a list with an entry for each. A SamplingParams is
        used as it is; a mapping sets some fields and leaves the others to the model's file; None
        leaves all. `lora_request` names an adapter for all prompts, or for each; None is the model
        without adapter. `use_tqdm` shows a progress bar. Raises RequestError before any prompt
        runs, if one cannot.
        """
        tokens = [tokens_of(prompt, self._parts.tokenizer) for prompt in listed(prompts)]
        return self._complete(tokens, sampling_params, scheduling, lora_request, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike | Sequence[ParamsLike] = None,
        *,
        scheduling: Scheduling | Sequence[Scheduling] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        use_tqdm: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, written with the model's chat template.

        A conversation that continues an answer of this LLM repeats that answer's own tokens
        (`exact_turns`). Errors as in `generate`, and RequestError for a wrong chat option.
        """
        prompts = [self._chat_tokens(conversation, options) for conversation in conversations(messages)]
        return self._complete(prompts, sampling_params, scheduling, lora_request, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: ParamsLike = None,
        *,
        scheduling: Scheduling | None = None,
        lora_request: Lora = None,
    ) -> Stream:
        """Complete one prompt piece by piece: iterate over the text, then read `result`."""
        return self._start_stream(tokens_of(prompt, self._parts.tokenizer), sampling_params, scheduling, lora_request)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: ParamsLike = None,
        *,
        scheduling: Scheduling | None = None,
        lora_request: Lora = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Answer one conversation piece by piece."""
        return self._start_stream(self._chat_tokens(messages, options), sampling_params, scheduling, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        scheduling: Scheduling | None = None,
        lora_request: Lora = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, in their order (vLLM's offline API)."""
        parts, adapter = self._parts, self._adapter(lora_request)
        if isinstance(params, BeamSearchParams) and params.structured is not None and parts.grammars is not None:
            # now, so that other threads do not wait for it
            parts.grammars.compile(params.structured)
        searched = []
        for prompt in listed(prompts):
            tokens = tokens_of(prompt, parts.tokenizer)
            searched.append((tokens.text, tokens.ids, scheduling_of(tokens, scheduling), adapter))
        name = f"beams-{next(self._numbers)}"
        return search_beams(self._driver, parts.tokenizer, searched, params, parts.plan.context, name)

    def encode(self, prompts: Prompt | Sequence[Prompt]) -> list[EmbeddingOutput]:
        """Embed prompts: the mean over all tokens of the final norm's output, scaled to length 1.

        Each embedding is float32 [C]. Raises RequestError for a prompt without tokens.
        """
        outputs = []
        for prompt in listed(prompts):
            tokens = tokens_of(prompt, self._parts.tokenizer)
            if not tokens.ids:
                raise RequestError("The prompt has no tokens; give at least one.", param="prompt")
            mean = self._driver.embed(tokens.ids)
            length = float(np.linalg.norm(mean.astype(np.float64)))
            embedding = mean if length == 0.0 else (mean / length).astype(np.float32)
            outputs.append(EmbeddingOutput(str(next(self._numbers)), tokens.text, list(tokens.ids), embedding))
        return outputs

    def add_lora(self, name: str, path: str) -> None:
        """Load an adapter under a name, replacing its earlier owner; running requests keep theirs.

        Raises RequestError if there is no such file, FormatError and UnsupportedError if it does
        not fit the model, and CapacityError if there is no room.
        """
        parts = self._parts
        adapter = open_adapter(path, parts.spec)
        self._driver.between_steps(lambda: parts.take_adapter(name, adapter))

    def remove_lora(self, name: str) -> None:
        """Forget an adapter; running requests keep it. RequestError for an unknown name."""
        parts = self._parts
        if name not in parts.adapters:
            raise RequestError(f"There is no adapter {name!r}.", param="lora_request")
        self._driver.between_steps(lambda: parts.drop_adapter(name))

    def list_loras(self) -> list[str]:
        """The names of the adapters that are loaded."""
        return list(self._parts.adapters)

    def close(self) -> None:
        """Free the model, its KV pages and its threads. Idempotent."""
        built, self._built, self._maker = self._built, None, None
        self._driver.close()
        if built is not None and not self._driver.is_forked:
            built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------
    @property
    def _parts(self) -> Built:
        if self._built is None:
            raise MartletError("This LLM is closed; make a new one.")
        return self._built

    @property
    def _requests(self) -> RequestMaker:
        if self._maker is None:
            raise MartletError("This LLM is closed; make a new one.")
        return self._maker

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[str, list[int]]:
        """A conversation's prompt: text and ids. Control tokens in a message stay plain text."""
        tokens = self._chat_tokens(messages, options)
        assert tokens.text is not None
        return tokens.text, list(tokens.ids)

    def _chat_tokens(self, messages: Sequence[Message], options: ChatOptions) -> PromptTokens:
        return self._requests.chat_tokens(messages, options)

    def _adapter(self, lora: Lora) -> str:
        return chosen_adapter(lora, self._parts.adapters, self.add_lora)

    def _prepared(
        self, prompt: PromptTokens, params: ParamsLike, scheduling: Scheduling | None, lora: Lora
    ) -> Prepared:
        return self._requests.asked(str(next(self._numbers)), prompt, params, scheduling, self._adapter(lora))

    def _start_stream(
        self, prompt: PromptTokens, params: ParamsLike, scheduling: Scheduling | None, lora: Lora
    ) -> Stream:
        prepared = self._prepared(prompt, params, scheduling, lora)
        if max(prepared.request.params.n, prepared.request.params.best_of or 1) > 1:
            raise RequestError("A stream has one answer; use generate for n > 1 and best_of > 1.", param="n")
        return Stream(self._driver, self._driver.start(prepared))

    def _complete(
        self,
        prompts: Sequence[PromptTokens],
        sampling_params: ParamsLike | Sequence[ParamsLike],
        scheduling: Scheduling | Sequence[Scheduling] | None,
        lora_request: Lora | Sequence[Lora],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = one_each("sampling_params", sampling_params, (SamplingParams, Mapping), len(prompts))
        schedulings = one_each("scheduling", scheduling, Scheduling, len(prompts))
        loras = one_each("lora_request", lora_request, (LoRARequest, str), len(prompts))
        columns = zip(prompts, each, schedulings, loras, strict=True)
        requests = [self._prepared(*row) for row in columns]
        with _progress_bar(use_tqdm, len(requests)) as show:
            return self._driver.run(requests, show)


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
