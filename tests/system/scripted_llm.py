"""An `LLM` whose model is a script: every part is real but the one that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.config import EngineConfig
from martlet.engine.build import Built
from martlet.engine.engine import Engine
from martlet.engine.memory import Footprint, plan_memory
from martlet.llm import LLM
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm
from martlet.tokenizer.chat_template import ChatTemplate
from martlet.tokenizer.tokenizer import Tokenizer
from tests.null.scripted import Script, ScriptedExecutor

__all__ = ["EOS", "byte_tokenizer", "scripted_built", "scripted_llm", "spell"]

PAGE = 4
EOS = 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A vocabulary of the 256 bytes, each a token with the byte's number as its id, and an end token."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's letters for bytes
    rest = {byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in kept)}
    tokens = [rest.get(byte, chr(byte)) for byte in range(256)] + ["<|end|>"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


def spell(text: str) -> Script:
    """A script that answers with the bytes of `text`, then ends."""
    ids = [*text.encode(), EOS]
    return lambda seq, number: ids[min(number, len(ids) - 1)]


def scripted_built(
    config: EngineConfig,
    script: Script,
    *,
    context: int = 64,
    n_pages: int = 64,
    template: str = TEMPLATE,
    suggested: Mapping[str, Any] | None = None,
    wrap: Callable[[ScriptedExecutor], Any] = lambda executor: executor,
    prefix_cache: bool = False,
    **limits: int,
) -> Built:
    """All parts of a start, around a script."""
    norm = Norm(1e-5)
    layer = Layer(Attention(1, 1, 8, 1.0, None), DenseFfn(8, Activation.SILU), norm, norm)
    spec = ModelSpec("llama", "scripted", 257, 8, context, (layer,), norm, True)
    tokenizer = byte_tokenizer()
    pages = PagePool(n_pages, PAGE)
    cache = RadixCache(pages) if prefix_cache else None
    scheduler = Scheduler(pages, SchedulerLimits(context, 16, 4, 8, **limits), frozenset({EOS}), cache=cache)
    return Built(
        config=config,
        engine=Engine(scheduler, wrap(ScriptedExecutor(script, PAGE)), pages),
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokenizer),
        spec=spec,
        plan=plan_memory(Footprint(spec, 0, 0, 0), config, None),
        suggested=suggested or {},
    )


def scripted_llm(
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    *,
    context: int = 64,
    suggested: Mapping[str, Any] | None = None,
    wrap: Callable[[ScriptedExecutor], Any] = lambda executor: executor,
) -> LLM:
    """An LLM that answers with `script`; `wrap` may put something around the executor."""

    def build(config: EngineConfig, progress: object) -> Built:
        return scripted_built(config, script, context=context, suggested=suggested, wrap=wrap)

    monkeypatch.setattr("martlet.llm.build", build)
    return LLM(__file__, backend="null")  # any file that is there
