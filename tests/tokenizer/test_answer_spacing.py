"""An answer's first space: with a SentencePiece vocabulary it depends on what the prompt ends
with.
"""

from __future__ import annotations

import pytest

from martlet.engine.outputs import OutputBuilder
from martlet.sampling_params import SamplingParams
from martlet.types import Event, Request
from tests.tokenizer.vocabs import vocab

BOS, HELLO, WORLD = 1, 15043, 3186  # of Llama 2's published vocabulary: <s>, "▁Hello", "▁world"


@pytest.mark.parametrize(("prompt", "text"), [((BOS, HELLO), " world"), ((BOS,), "world")])
def test_a_continuation_keeps_its_space(prompt: tuple[int, ...], text: str) -> None:
    tokenizer = vocab("llama-spm")
    assert [tokenizer.token_text(token) for token in (HELLO, WORLD)] == ["▁Hello", "▁world"]
    builder = OutputBuilder(Request("0", prompt, SamplingParams()), tokenizer, lambda *_: None)
    builder.accept(Event("0", 0, WORLD))
    assert builder.output.outputs[0].text == text
