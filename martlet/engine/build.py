"""The only wiring: from settings to a running engine.

Read `engine.py` next, or `memory.py` for the memory.

files → memory plan → packed model, KV pages → rank, sampling, drafter → scheduler → engine
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from martlet.cache.pages import PagePool
from martlet.config import EngineConfig, Origin
from martlet.engine.assemble import assemble
from martlet.engine.disk_pages import make_cache, open_disk_pages
from martlet.engine.engine import Engine
from martlet.engine.lora import open_adapter, open_adapters
from martlet.engine.memory import Footprint, MemoryPlan, measure, plan_memory, step_limits, with_adapters, with_head
from martlet.engine.observers import capsule_header, observers
from martlet.engine.packed import packed_weights
from martlet.engine.params import suggested_params
from martlet.errors import RequestError
from martlet.formats.checkpoint import Checkpoint, open_checkpoint
from martlet.grammar.grammars import Grammars
from martlet.kv_types import parse_kv_types, share_granularity
from martlet.metrics import StartPhase
from martlet.models.eagle_head import HeadFile
from martlet.models.lora import Adapter
from martlet.models.medusa_heads import MedusaFile
from martlet.models.weights import Model, load_model
from martlet.ops.backends import abilities_of, make_backend
from martlet.ops.interface import Ability, Backend, StepLimits
from martlet.runtime.disk_file import DiskFile
from martlet.runtime.executors import LocalExecutor
from martlet.runtime.f16_window import F16Window
from martlet.runtime.kv import KvMemory, allocate_caches, kv_bytes_per_token
from martlet.runtime.lora import AdapterBank
from martlet.runtime.page_moves import PageMoves
from martlet.runtime.rank import Rank
from martlet.runtime.sampling import Sampling
from martlet.sample.random import SeedSource
from martlet.sample.sampler import Sampler
from martlet.sched.policy import POLICIES
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.spec import ModelSpec
from martlet.speculate.drafter import Drafter
from martlet.speculate.load_drafter import load_drafter, open_draft_head, with_head_pages
from martlet.speculate.model_drafter import ModelDrafter
from martlet.speculate.ngram import NgramDrafter
from martlet.tokenizer.chat_template import ChatTemplate
from martlet.tokenizer.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]  # phase, done, in all


@dataclass(slots=True)
class Built:
    """Everything that a start makes."""

    config: EngineConfig
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    spec: ModelSpec
    plan: MemoryPlan
    start: tuple[StartPhase, ...] = ()
    suggested: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters that the model's file suggests
    warnings: tuple[str, ...] = ()
    header: Callable[[], dict[str, Any]] = dict  # what a capsule of this engine says of it
    seeds: SeedSource = field(default_factory=SeedSource)  # for requests without one
    grammars: Grammars | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by name

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter, between two steps; raises as `open_adapter` does."""
        self.take_adapter(name, open_adapter(path, self.spec))

    def take_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter that was read, between two steps; its name means no other any more."""
        self.engine.add_adapter(adapter)
        before = self.adapters.get(name)  # other threads read: the name never stands for nothing
        self.adapters[name] = adapter.without_numbers()
        self._let_go(before)

    def drop_adapter(self, name: str) -> None:
        """Take no more requests with an adapter; those that run keep it to their end."""
        self._let_go(self.adapters.pop(name, None))

    def _let_go(self, adapter: Adapter | None) -> None:
        if adapter is not None and all(other.digest != adapter.digest for other in self.adapters.values()):
            self.engine.remove_adapter(adapter.digest)

    def close(self) -> None:
        """Free everything. Idempotent."""
        self.engine.close()
        self.resources.close()


class _Timeline:
    def __init__(self) -> None:
        self.phases: list[StartPhase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases.append(StartPhase(name, time.perf_counter() - start))


@dataclass(frozen=True, slots=True)
class _Files:
    """What a start reads before anything large is allocated."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    suggested: Mapping[str, Any]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The packed model and the memory of its steps."""

    ops: Backend
    model: Model
    kv: KvMemory
    limits: StepLimits
    head: HeadFile | MedusaFile | None
    tier: DiskFile | None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What runs plans, and what guesses."""

    rank: Rank
    executor: LocalExecutor
    sampler: Sampler
    grammars: Grammars
    drafter: Drafter | None


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Open, plan, load, capture and warm up; whatever fails, nothing is left behind.

    Raises FormatError and UnsupportedError for the model's files, CapacityError where memory is too
    small.
    """
    timeline = _Timeline()
    with ExitStack() as resources:
        with timeline.phase("read"):
            files = _read(config, resources)
        with timeline.phase("plan"):
            plan, adapters = _planned(files.checkpoint, config)
        config = _decided(config, plan)
        with timeline.phase("map"):
            loaded = _load(config, files.checkpoint, plan, _phase(progress, "map"), resources)
        with timeline.phase("compile"):
            compiled = _compile(config, files, plan, loaded, resources)
        with timeline.phase("warm"):
            compiled.rank.warm()
            load_s = compiled.rank.probe_load()
        engine = _join(config, files, plan, loaded, compiled, load_s, resources)
        for adapter in adapters.values():
            engine.add_adapter(adapter)
        return Built(
            config,
            engine,
            files.tokenizer,
            files.template,
            loaded.model.spec,
            plan,
            tuple(timeline.phases),
            files.suggested,
            (*files.warnings, *files.tokenizer.warnings, *files.template.warnings),
            partial(capsule_header, config, plan, files.checkpoint, loaded.ops),
            compiled.sampler.seeds,
            compiled.grammars,
            adapters={name: adapter.without_numbers() for name, adapter in adapters.items()},
            resources=resources.pop_all(),
        )


def _read(config: EngineConfig, resources: ExitStack) -> _Files:
    checkpoint = resources.enter_context(_open(config))
    tokenizer = load_tokenizer(checkpoint, config)
    template = load_template(checkpoint, tokenizer, config)
    suggested, warnings = suggested_params(checkpoint.generation_config)
    return _Files(checkpoint, tokenizer, template, suggested, tuple(warnings))


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    progress: Callable[[int, int], None] | None,
    resources: ExitStack,
) -> _Loaded:
    """Pack the model, and allocate pages for it and for the draft head that the settings name."""
    ops = make_backend(config)
    resources.callback(ops.close)
    with packed_weights(config, checkpoint, ops):
        model = load_model(checkpoint, ops, context=plan.context, progress=progress)
    limits = _limits(config, model, plan.context, ops)
    kv = allocate_caches(ops, model.spec, plan.n_pages, config.page_size, config.kv_dtype, limits)
    head = open_draft_head(config, checkpoint, model.spec, resources)
    model, kv = with_head_pages(head, model, kv, ops, config, plan.n_pages)
    tier = open_disk_pages(config, checkpoint, model.spec, ops, kv, resources)
    return _Loaded(ops, model, kv, limits, head, tier)


def _compile(config: EngineConfig, files: _Files, plan: MemoryPlan, loaded: _Loaded, resources: ExitStack) -> _Compiled:
    """Capture the model's steps and the drafter's."""
    ops, model, kv, limits, page_size = loaded.ops, loaded.model, loaded.kv, loaded.limits, config.page_size
    grammars = _grammars(config, files.tokenizer, model.spec.vocab)
    sampler = Sampler(files.tokenizer, model.spec.vocab, config.seed, grammars.matcher)
    window = F16Window(kv.recent, page_size) if kv.recent else None
    adapters = AdapterBank(ops, model, kv.caches, limits)
    rank = Rank(ops, model, kv.caches, limits, page_size, PageMoves(ops, kv.all, loaded.tier), adapters, window)
    reader = load_drafter(loaded.head, files.checkpoint, model, kv, ops, limits, page_size, plan.n_pages)
    drafter = reader or make_drafter(config, plan, files.tokenizer, model.spec.vocab, resources)
    return _Compiled(rank, LocalExecutor(rank, Sampling(sampler), reader), sampler, grammars, drafter)


def _join(
    config: EngineConfig,
    files: _Files,
    plan: MemoryPlan,
    loaded: _Loaded,
    compiled: _Compiled,
    load_s: float | None,
    resources: ExitStack,
) -> Engine:
    """Scheduler and executor as an engine; `load_s` is the time to load a second tier's page."""
    pages = PagePool(plan.n_pages, config.page_size)
    scheduler = Scheduler(
        pages,
        _scheduler_limits(config, plan.context, len(loaded.model.spec.layers), loaded.limits),
        files.tokenizer.eog_ids,
        cache=make_cache(config, pages, loaded.tier),
        policy=POLICIES[config.policy],
        share_granularity=share_granularity(config.kv_dtype),
        row_tile=loaded.ops.abilities.row_tile,
    )
    if load_s is not None:
        scheduler.cost.observe_load(1, load_s)
    watching = observers(config, plan, files.checkpoint, loaded.ops, resources)
    check, drafter = compiled.sampler.check, compiled.drafter
    return assemble(scheduler, compiled.executor, pages, check=check, observers=watching, drafter=drafter)


def _planned(checkpoint: Checkpoint, config: EngineConfig) -> tuple[MemoryPlan, dict[str, Adapter]]:
    """The memory plan, and the adapters that it counts."""
    footprint = measure_for(checkpoint, config)
    adapters = open_adapters(config.lora, footprint.spec)
    footprint = with_adapters(footprint, sum(adapter.nbytes for adapter in adapters.values()))
    return plan_memory(footprint, config, abilities_of(config).memory_available()), adapters


def _grammars(config: EngineConfig, tokenizer: Tokenizer, n_logits: int) -> Grammars:
    n_vocab = min(tokenizer.vocab_size, n_logits)
    return Grammars(tokenizer, n_vocab, (config.string_limit, config.item_limit))


def _limits(config: EngineConfig, model: Model, context: int, ops: Backend) -> StepLimits:
    """The largest step; a backend without sections computes no chunk between layers."""
    limits = step_limits(config, model.spec.vocab, context)
    return limits if Ability.SECTIONS in ops.abilities.features else replace(limits, layered_rows=0)


def _scheduler_limits(config: EngineConfig, context: int, n_layers: int, step: StepLimits) -> SchedulerLimits:
    return SchedulerLimits(
        context,
        step.max_tokens,
        step.max_seqs,
        step.max_logits,
        config.max_waiting,
        config.max_waiting_tokens,
        None if config.stall_ms is None else config.stall_ms / 1000,
        step.layered_rows,
        n_layers,
    )


def measure_for(checkpoint: Checkpoint, config: EngineConfig) -> Footprint:
    """What the model needs on the backend that the settings name, a draft head included."""
    footprint = measure(checkpoint, config, abilities_of(config))
    with ExitStack() as resources:
        head = open_draft_head(config, checkpoint, footprint.spec, resources)
        return footprint if head is None else with_head(footprint, head, config, abilities_of(config))


def plan_for(checkpoint: Checkpoint, config: EngineConfig) -> MemoryPlan:
    """The memory plan on this machine; raises CapacityError where the model does not fit."""
    return plan_memory(measure_for(checkpoint, config), config, abilities_of(config).memory_available())


def _open(config: EngineConfig, param: str = "model") -> Checkpoint:
    if not Path(config.model).exists():
        raise RequestError(
            f"There is no file or folder {config.model!r}: give the path of a GGUF file or of a Hugging Face folder.",
            param=param,
        )
    return open_checkpoint(config.model)


def make_drafter(
    config: EngineConfig, plan: MemoryPlan, tokenizer: Tokenizer, vocab: int, resources: ExitStack
) -> Drafter | None:
    """Who guesses tokens, by the settings; `resources` frees a model that does.

    Raises as `build` does for a model that cannot be opened, and RequestError for a model of
    another vocabulary.
    """
    kind, _, path = config.draft.partition("=")
    if kind != "model":
        return None if kind == "off" else NgramDrafter()
    own = replace(config, model=path, max_context=None, kv_dtype="f16", oracle=False)
    checkpoint = resources.enter_context(_open(own, "draft"))
    if not load_tokenizer(checkpoint, own).has_same_tokens(tokenizer):
        raise RequestError(
            f"The draft model {path!r} has another vocabulary than {config.model!r}: give one of the same family.",
            param="draft",
        )
    footprint = measure_for(checkpoint, own)
    context = min(plan.context, footprint.spec.context)
    page_bytes = own.page_size * kv_bytes_per_token(footprint.spec, parse_kv_types("f16"), own.page_size)
    own = replace(own, max_context=context, kv_memory=plan.n_pages * page_bytes)
    plan_memory(footprint, own, None if plan.available is None else plan.available - plan.total)
    ops = make_backend(own)
    resources.callback(ops.close)
    model = load_model(checkpoint, ops, context=context)
    limits = step_limits(own, model.spec.vocab, context)
    kv = allocate_caches(ops, model.spec, plan.n_pages, own.page_size, "f16", limits)
    drafter = ModelDrafter(ops, model, kv, limits, PagePool(plan.n_pages, own.page_size), vocab)
    drafter.warm()
    return drafter


def load_tokenizer(checkpoint: Checkpoint, config: EngineConfig) -> Tokenizer:
    """The model's tokenizer, from a GGUF file's metadata or from tokenizer.json."""
    if checkpoint.tokenizer_json is None:
        return Tokenizer.from_gguf(checkpoint.metadata, pre=config.tokenizer_pre, source=config.model)
    ends = checkpoint.generation_config.get("eos_token_id")
    return Tokenizer.from_hf(
        checkpoint.tokenizer_json,
        checkpoint.tokenizer_config,
        pre=config.tokenizer_pre,
        eos_ids=ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else [],
    )


def load_template(checkpoint: Checkpoint, tokenizer: Tokenizer, config: EngineConfig) -> ChatTemplate:
    """The chat template: the option's, else the file's, else a fallback that says so."""
    return ChatTemplate(config.chat_template or checkpoint.chat_template, tokenizer)


def _decided(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """The settings with the context and the KV types that the plan chose."""
    if plan.kv_dtype != config.kv_dtype:
        note = "keys too uneven for 8 bits stay f16; name a layer to decide otherwise"
        config = config.with_value("kv_dtype", plan.kv_dtype, Origin.MODEL_FILE, note)
    if config.max_context is not None:
        return config
    origin = Origin.MODEL_FILE if plan.context_note == "the model's own" else Origin.MACHINE
    return config.with_value("max_context", plan.context, origin, plan.context_note)


def _phase(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
