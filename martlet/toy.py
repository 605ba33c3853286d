"""Toy parts: a tiny random model, a tokenizer of bytes and an executor that follows a script.

They run the whole engine without a download, for tests, docs and experiments:

>>> from martlet import LLM, SamplingParams, toy
>>> path = toy.write_model("toy.gguf", family="llama")
>>> with LLM(str(path), threads=1) as llm:
...     params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
...     [output] = llm.generate("hello", params)
>>> len(output.outputs[0].token_ids)
8

With `scripted_llm` no model computes: every other part is real, and the answer is known in advance.

>>> with toy.scripted_llm(toy.spell("It is blue.")) as llm:
...     llm.generate("Why?")[0].outputs[0].text
'It is blue.'
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.config import EngineConfig, resolve_config
from martlet.engine.assemble import assemble
from martlet.engine.build import Built
from martlet.engine.memory import Footprint, plan_memory
from martlet.errors import UnsupportedError
from martlet.formats.gguf_write import write_gguf
from martlet.llm import LLM
from martlet.models.lora import Adapter
from martlet.quant.encode import encode
from martlet.quant.table import BlockType, RawTensor
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm
from martlet.tokenizer.chat_template import ChatTemplate
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import Load, PageId, Sampled, SeqId, SlotId, Span, Started, StepPlan, StepResult, TokenLogprobs

F32 = NDArray[np.float32]
Script = Callable[[Started, int], int | str]  # sequence, number of the token → its id, or an error's text

END = 256  # the id of the end token; the ids below it are the bytes
VOCAB = 258  # the bytes, the end token, and the pair "th"
HIDDEN, FFN_HIDDEN, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 3, 4, 2, 16, 256
N_EXPERTS, EXPERT_HIDDEN = 6, 32

PAGE = 4  # positions of a page beneath a script
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

_BIASES = {
    "attn_q.bias": N_HEADS * HEAD_DIM,
    "attn_k.bias": N_KV_HEADS * HEAD_DIM,
    "attn_v.bias": N_KV_HEADS * HEAD_DIM,
}
_QK_NORMS = {"attn_q_norm.weight": HEAD_DIM, "attn_k_norm.weight": HEAD_DIM}
_EXPERTS = {"expert_count": N_EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_HIDDEN}
_POST_NORMS = {"post_attention_norm.weight": HIDDEN, "post_ffw_norm.weight": HIDDEN}
# family → (a layer's further vectors with their lengths, the family's own settings)
FAMILIES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ({}, {}),
        "qwen2": (_BIASES, {}),
        "qwen3": (_QK_NORMS, {}),
        "qwen2moe": (_BIASES, {**_EXPERTS, "expert_shared_feed_forward_length": FFN_HIDDEN}),
        "qwen3moe": (_QK_NORMS, _EXPERTS),
        "gpt-oss": (
            {**_BIASES, "attn_output.bias": HIDDEN, "attn_sinks.weight": N_HEADS, "ffn_gate_inp.bias": N_EXPERTS},
            {**_EXPERTS, "attention.sliding_window": 40},
        ),
        "gemma2": (
            _POST_NORMS,
            {"attention.sliding_window": 40, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        ),
        "gemma3": (
            _QK_NORMS | _POST_NORMS,
            {"attention.sliding_window": 40, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        ),
    }
)


def tokenizer_metadata(*, pair: bool = True) -> dict[str, Any]:
    """GGUF metadata of the byte tokenizer; `pair` adds a token for "th", which a merge makes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's letters for bytes
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokens = [letters.get(byte, chr(byte)) for byte in range(256)] + ["<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + ["th"] * pair,
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * pair,
        "tokenizer.ggml.merges": ["t h"] * pair,
        "tokenizer.ggml.eos_token_id": END,
    }


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of the 256 bytes, with their own numbers as ids, and the end token END."""
    return Tokenizer.from_gguf(tokenizer_metadata(pair=False))


def write_model(
    path: str | Path,
    family: str = "llama",
    *,
    quantised: bool = True,
    n_layers: int = N_LAYERS,
    tied: bool = True,
    seed: int = 7,
    settings: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[str, F32], F32] = lambda name, values: values,
) -> Path:
    """Write a random model with the byte tokenizer as a GGUF file of about 100 kB; return the path.

    `quantised` stores matrices as Q8_0 and Q4_0, otherwise everything is float32. `tied` False
    gives the model an output matrix of its own, float32 as the embedding then is. `settings` adds
    or replaces the family's metadata, with keys as "rope.freq_base". `change` sees each tensor,
    float32 [n] or [n, k], under its GGUF name, and returns its values. Equal arguments give equal
    bytes. UnsupportedError for a family that is not in FAMILIES.
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"no toy model of the family {family!r}", FAMILIES)
    own_settings = {**FAMILIES[family][1], **settings}
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": n_layers,
        "feed_forward_length": FFN_HIDDEN,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCAB,
    }
    keys = {f"{family}.{key}": value for key, value in {**sizes, **own_settings}.items()}
    metadata = {"general.architecture": family, "general.name": "tiny", **keys, **tokenizer_metadata()}
    rng = np.random.default_rng(seed)
    tensors = []
    for name, (shape, block_type) in _shapes(family, n_layers, own_settings, tied).items():
        values = (rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.05)).astype(np.float32)
        centre = 4 if ".post_" in name else 1  # with 4 a layer outweighs Gemma's scaled embedding
        values = change(name, values if len(shape) > 1 else values + np.float32(centre))
        stored = block_type if quantised else BlockType.F32
        data = encode(values.reshape(-1, shape[-1]), stored).reshape(-1)
        tensors.append(RawTensor(name, shape, stored, data))
    [written] = write_gguf(path, metadata, tensors)
    return written


def _ffn_shapes(settings: Mapping[str, Any], biases: bool) -> dict[str, tuple[tuple[int, ...], BlockType]]:
    """The matrices of a layer's feed-forward part: dense, or a mixture of experts."""
    f32, q8, q4 = BlockType.F32, BlockType.Q8_0, BlockType.Q4_0
    n_experts, shared = settings.get("expert_count", 0), settings.get("expert_shared_feed_forward_length", 0)
    if not n_experts:
        return {
            "ffn_gate.weight": ((FFN_HIDDEN, HIDDEN), q4),
            "ffn_up.weight": ((FFN_HIDDEN, HIDDEN), q4),
            "ffn_down.weight": ((HIDDEN, FFN_HIDDEN), q8),
        }
    shapes: dict[str, tuple[tuple[int, ...], BlockType]] = {
        "ffn_gate_inp.weight": ((n_experts, HIDDEN), f32),
        "ffn_gate_exps.weight": ((n_experts, EXPERT_HIDDEN, HIDDEN), q4),
        "ffn_up_exps.weight": ((n_experts, EXPERT_HIDDEN, HIDDEN), q4),
        "ffn_down_exps.weight": ((n_experts, HIDDEN, EXPERT_HIDDEN), q8),
    }
    if biases:
        widths = {"gate": EXPERT_HIDDEN, "up": EXPERT_HIDDEN, "down": HIDDEN}
        shapes |= {f"ffn_{name}_exps.bias": ((n_experts, width), f32) for name, width in widths.items()}
    if shared:
        shapes |= {
            "ffn_gate_inp_shexp.weight": ((1, HIDDEN), f32),
            "ffn_gate_shexp.weight": ((shared, HIDDEN), q4),
            "ffn_up_shexp.weight": ((shared, HIDDEN), q4),
            "ffn_down_shexp.weight": ((HIDDEN, shared), q8),
        }
    return shapes


def _shapes(
    family: str, n_layers: int, settings: Mapping[str, Any], tied: bool
) -> dict[str, tuple[tuple[int, ...], BlockType]]:
    """Each tensor's shape and block type, in the order in which their values are drawn."""
    f32, q8, q4 = BlockType.F32, BlockType.Q8_0, BlockType.Q4_0
    vectors, is_oss = FAMILIES[family][0], family == "gpt-oss"
    shapes: dict[str, tuple[tuple[int, ...], BlockType]] = {"token_embd.weight": ((VOCAB, HIDDEN), q8 if tied else f32)}
    for layer in range(n_layers):
        tensors: dict[str, tuple[tuple[int, ...], BlockType]] = {
            "attn_norm.weight": ((HIDDEN,), f32),
            "attn_q.weight": ((N_HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_k.weight": ((N_KV_HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_v.weight": ((N_KV_HEADS * HEAD_DIM, HIDDEN), q8),
            "attn_output.weight": ((HIDDEN, N_HEADS * HEAD_DIM), q8),
            ("post_attention_norm" if is_oss else "ffn_norm") + ".weight": ((HIDDEN,), f32),
            **_ffn_shapes(settings, is_oss),
        }
        tensors |= {name: ((length,), f32) for name, length in vectors.items()}
        shapes |= {f"blk.{layer}.{name}": tensor for name, tensor in tensors.items()}
    shapes["output_norm.weight"] = ((HIDDEN,), f32)
    if not tied:
        shapes["output.weight"] = ((VOCAB, HIDDEN), f32)
    return shapes


def spell(text: str) -> Script:
    """Return a script that answers with the bytes of `text`, then ends."""
    ids = [*text.encode(), END]
    return lambda seq, number: ids[min(number, len(ids) - 1)]


class _Rows:
    """A worker's record of a sequence: its ids and its page table."""

    def __init__(self, seq: Started) -> None:
        self.seq = seq
        self.ids = list(seq.request.prompt_ids)
        self.pages: list[PageId] = []
        self.histories: list[int] = []  # the number of the prefix that ends at each position


class ScriptedExecutor:
    """An executor without a model: token number i of a sequence is `script(sequence, i)`.

    It checks every plan. Like a worker in another process it keeps its own record, and for every
    position of every page the prefix that was computed there. A span may only be computed where all
    positions before it hold the sequence's own prefix, so any page that is shared, copied, loaded
    or evicted wrongly raises AssertionError. `fails` says which loads from disk fail.
    """

    def __init__(self, script: Script, page_size: int, fails: Callable[[Load], bool] | None = None) -> None:
        self._script = script
        self._page_size = page_size
        self._fails = fails
        self._sequences: dict[SeqId, _Rows] = {}
        self._prefixes: dict[tuple[int, int], int] = {}  # number of a prefix and the next id → number of both together
        self._contents: dict[PageId, list[int]] = {}
        self._tier: dict[SlotId, tuple[bytes, list[int]]] = {}
        self._begun: tuple[SeqId, int, int, int] | None = None  # a chunk between two layers: whose, start, count, layer
        self.adapters: set[str] = set()
        self.plans: list[StepPlan] = []
        self.keep_plans = True

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        if self.keep_plans:
            self.plans.append(plan)
        for seq_id in plan.dropped:
            self._sequences.pop(seq_id, None)  # it may have been added by a plan that nobody ran
        if self._begun is not None and self._begun[0] in (*plan.dropped, *plan.preempted):
            self._begun = None
        assert [(new.seq, new.request.request_id, new.index, new.request.adapter) for new in started] == [
            (added.seq, added.request_id, added.index, added.adapter) for added in plan.added
        ]
        for seq in started:
            assert seq.seq not in self._sequences
            assert seq.request.adapter in ("", *self.adapters)
            self._sequences[seq.seq] = _Rows(seq)
        for save in plan.saves:
            self._tier[save.slot] = save.key, list(self._page(save.page))
        failed = []
        for load in plan.loads:
            key, contents = self._tier.get(load.slot, (b"", []))
            if key != load.key or (self._fails is not None and self._fails(load)):
                failed.append(load.slot)
                self._contents[load.page] = [-2] * self._page_size  # whatever was read
            else:
                self._contents[load.page] = list(contents)
        for copy in plan.copies:
            self._contents[copy.target] = list(self._page(copy.source))
        sampled = [self._span(span) for span in plan.spans]
        samples = tuple(entry for entry in sampled if entry is not None)
        return StepResult(plan.step, samples, failed_loads=tuple(failed), load_s=1e-4 * len(plan.loads))

    def _page(self, page: PageId) -> list[int]:
        return self._contents.setdefault(page, [-1] * self._page_size)

    def _span(self, span: Span) -> Sampled | None:
        rows, size = self._sequences[span.seq], self._page_size
        if span.new_pages:
            assert span.first_page <= len(rows.pages)
            rows.pages[span.first_page :] = span.new_pages
        end = span.start + span.count
        assert span.count >= 1
        ids = [*rows.ids, *span.draft] if span.draft else rows.ids
        assert end <= len(ids)
        assert span.ids == tuple(ids[span.start : end]), "a plan says other ids than the sequence has"
        if span.draft:
            assert end == len(ids)
            assert span.count == span.n_logits == len(span.draft) + 1
        assert len(rows.pages) * size >= end, "a position has no page"
        assert 0 <= span.n_logits <= span.count
        for position in range(len(rows.histories), end):
            before = rows.histories[-1] if rows.histories else 0
            prefix = before, ids[position]
            rows.histories.append(self._prefixes.setdefault(prefix, len(self._prefixes) + 1))
        if self._goes_on(span):
            return None
        for first in range(0, span.start, size):
            count = min(size, span.start - first)
            held = self._page(rows.pages[first // size])[:count]
            assert held == rows.histories[first : first + count], "a page does not hold the sequence's prefix"
        for position in range(span.start, end):
            self._page(rows.pages[position // size])[position % size] = rows.histories[position]
        if span.n_logits == 0:
            assert end < len(rows.ids), "a finished prompt asks for no token"
            return None
        seq = rows.seq
        scored = tuple(
            TokenLogprobs(rows.ids[position + 1], -1.0, 1)
            for position in range(end - span.n_logits, end)
            if seq.request.params.prompt_logprobs is not None and seq.index == 0 and position + 1 < seq.n_prompt
        )
        if end < len(rows.ids) or seq.request.params.max_tokens == 0:
            return Sampled(span.seq, None, prompt_logprobs=scored)
        token = self._script(seq, len(rows.ids) - seq.n_prompt)
        if isinstance(token, str):
            return Sampled(span.seq, None, error=token)
        rows.ids.append(token)
        more = self._verify(rows, span)
        del rows.histories[len(rows.ids) - 1 :]  # of wrong guesses
        return Sampled(span.seq, token, prompt_logprobs=scored, more=more)

    def _goes_on(self, span: Span) -> bool:
        """Whether layers are to come. What is begun goes on in order, alone until it ends."""
        if span.is_layered and span.first_layer == 0:
            assert self._begun is None, "two chunks are between layers"
        elif span.first_layer > 0 or (self._begun is not None and self._begun[0] == span.seq):
            assert self._begun == (span.seq, span.start, span.count, span.first_layer)
        else:
            return False
        rows, size = self._sequences[span.seq], self._page_size
        for position in range(span.start, span.start + span.count):
            self._page(rows.pages[position // size])[position % size] = -4  # not to be read yet
        if span.stop_layer is None:
            self._begun = None
            return False
        assert span.n_logits == 0
        self._begun = span.seq, span.start, span.count, span.stop_layer
        return True

    def _verify(self, rows: _Rows, span: Span) -> tuple[tuple[int, None], ...]:
        """The tokens after the first, as long as the guess before each was right."""
        seq, tokens = rows.seq, []
        for guess in span.draft:
            ends = rows.ids[-1] in seq.stop_ids and len(rows.ids) - seq.n_prompt >= seq.request.params.min_tokens
            token = self._script(seq, len(rows.ids) - seq.n_prompt)
            if rows.ids[-1] != guess or ends or isinstance(token, str):
                break
            rows.ids.append(token)
            tokens.append((token, None))
        return tuple(tokens)

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> NDArray[np.float32]:
        assert len(pages) * self._page_size >= len(ids)
        for page in pages:
            self._contents[page] = [-3] * self._page_size
        return np.array([len(ids), 0.0], dtype=np.float32)

    def add_adapter(self, adapter: Adapter) -> None:
        self.adapters.add(adapter.digest)

    def remove_adapter(self, digest: str) -> None:
        self.adapters.remove(digest)

    def close(self) -> None:
        self._sequences.clear()


def scripted_built(
    config: EngineConfig,
    script: Script,
    *,
    context: int = 64,
    n_pages: int = 64,
    template: str = TEMPLATE,
    suggested: Mapping[str, Any] = MappingProxyType({}),
    wrap: Callable[[ScriptedExecutor], Any] = lambda executor: executor,
    prefix_cache: bool = False,
    **limits: int,
) -> Built:
    """Return the parts of an engine around a script; `limits` are fields of SchedulerLimits."""
    norm = Norm(1e-5)
    layer = Layer(Attention(1, 1, 8, 1.0, None), DenseFfn(8, Activation.SILU), norm, norm)
    spec = ModelSpec("llama", "scripted", 257, 8, context, (layer,), norm, True)
    tokenizer = byte_tokenizer()
    pages = PagePool(n_pages, PAGE)
    cache = RadixCache(pages) if prefix_cache else None
    scheduler = Scheduler(pages, SchedulerLimits(context, 16, 4, 8, **limits), frozenset({END}), cache=cache)
    return Built(
        config=config,
        engine=assemble(scheduler, wrap(ScriptedExecutor(script, PAGE)), pages),
        tokenizer=tokenizer,
        template=ChatTemplate(template, tokenizer),
        spec=spec,
        plan=plan_memory(Footprint(spec, 0, 0, 0, 0), config, None),
        suggested=suggested,
    )


def scripted_llm(script: Script, **options: Any) -> LLM:
    """Return an LLM that answers with `script`; `options` are those of `scripted_built`."""
    config = resolve_config({"model": __file__, "backend": "null"})  # any file that is there
    return LLM.from_built(scripted_built(config, script, **options))
