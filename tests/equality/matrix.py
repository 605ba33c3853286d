"""The equality matrix: what it compares, its features, and how each shows that it happened (read
`covering.py` next).

The plain run answers one request at a time on one thread, the whole prompt in one step, nothing
cached, nothing forked. A row turns one or two features on, and must give the same bits: logits,
log-probabilities, tokens, ends. A row fails if its feature did not happen: every feature has a
`proof` that reads what the run has done. A new feature of the engine is a new entry of FEATURES;
`covering.py` makes the rows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fitted import fitted
from held_load import BEAM_FORM
from kinds import OWN_LAYER
from loads import Load, asked_of, like
from seen import Answers, Seen, hit, order_differs, whole

from martlet import LLM
from martlet.formats.checkpoint import open_checkpoint
from martlet.llm import BeamSearchParams
from martlet.models.families import spec_of
from martlet.types import MissReason, Request
from tests.models.adapter_files import random_updates, write_peft

PAGE = 32
PLENTY = 64  # pages, where there shall be enough
POLICIES = ("priority", "shortest", "prefix", "fair", "deadline")


@dataclass(frozen=True)
class Feature:
    """How a run turns it on, and how the run shows that it happened.

    Where two features set the same number, the smaller counts.
    """

    proof: Callable[[Seen], bool]
    options: dict[str, Any] = field(default_factory=dict)
    max_seqs: int | None = None
    pages: str | None = None  # the field of Load with the number of pages
    batch: bool = False  # all requests arrive at once
    staggered: bool = False  # requests arrive while others run
    shuffled: bool = False  # requests arrive in another order
    primed: bool = False  # a request that resembles a later one runs before all others
    # what runs before and after each request: "like", "filler", itself "again"
    around: tuple[str, ...] = ()
    beams: bool = False
    held: bool = False  # a grammar holds each request, and forces several tokens in a step
    adapters: bool = False  # some requests run with adapters too, beside the same requests without
    # the drafter: "ngram", "model" (the model itself), or "head", "medusa", "mtp" (fitted)
    draft: str | None = None
    guesses: int = 3  # tokens of a draft
    disk: str | None = None  # "cold": an empty folder; "warm": the folder of an earlier engine
    excludes: tuple[str, ...] = ()  # other ways to do the same
    in_pairs: bool = True
    only_on: str | None = None  # the model that has it, where no other does


def _policy(name: str, in_pairs: bool) -> Feature:
    return Feature(
        order_differs,
        {"policy": name, "prefix_cache": True},
        max_seqs=3,
        batch=True,
        primed=True,
        excludes=("other order", *(f"policy {other}" for other in POLICIES if other != name)),
        in_pairs=in_pairs,
    )


# Beside a feature that takes most of the pages away, and so makes somebody lose theirs, others may
# have to run one by one.
FEATURES: dict[str, Feature] = {
    "two threads": Feature(lambda seen: seen.n_threads == 2, {"threads": 2}),
    "four threads": Feature(lambda seen: seen.n_threads == 4, {"threads": 4}, in_pairs=False),
    "batch": Feature(
        lambda seen: seen.most_spans >= 2 and (seen.n_mixed > 0 or seen.n_preempted > 0), max_seqs=8, batch=True
    ),
    "other order": Feature(
        lambda seen: order_differs(seen) and (seen.joined > 0 or seen.n_preempted > 0),
        max_seqs=8,
        staggered=True,
        shuffled=True,
    ),
    "chunks of 7": Feature(lambda seen: max(seen.chunks.values()) >= 6, {"max_step_tokens": 7}),
    "chunks by time": Feature(  # no step is as short: as little of each prompt as there is
        lambda seen: max(seen.chunks.values()) >= 3,
        {"stall_ms": 1.0, "max_step_tokens": 15},
        max_seqs=8,
        staggered=True,
        excludes=("chunks of 7", "layers"),
    ),
    # the same, where a step has room for a chunk that goes through a layer at a time
    "layers": Feature(
        lambda seen: seen.n_layered >= 4,
        {"stall_ms": 1.0},
        max_seqs=8,
        staggered=True,
        excludes=("chunks of 7", "disk"),  # what the disk leaves of a prompt is too short
    ),
    "full hit": Feature(
        lambda seen: hit(seen, lambda n, of, why: n == whole(seen, of) > 0), {"prefix_cache": True}, around=("again",)
    ),
    "partial hit": Feature(
        lambda seen: hit(seen, lambda n, of, why: 0 < n < whole(seen, of) or (n > 0 and why is MissReason.DIFFERS)),
        {"prefix_cache": True},
        around=("like",),
    ),
    "evicted": Feature(
        lambda seen: (
            seen.n_evicted > 0
            and (hit(seen, lambda n, of, why: n > 0 and why is MissReason.EVICTED) or seen.n_loads > 0)
        ),
        {"prefix_cache": True},
        pages="some",
        around=("filler", "again"),
    ),
    "disk": Feature(
        lambda seen: seen.n_loads > 0 and seen.n_failed == 0, {"prefix_cache": True}, disk="warm", excludes=("swap",)
    ),
    "recompute": Feature(
        lambda seen: seen.n_preempted > 0 and seen.n_again > 0,
        max_seqs=8,
        pages="few",
        batch=True,
        excludes=("swap", "disk"),
    ),
    # What was lost came from the disk; beside slow prompts it may still have been in memory, and
    # beside pages that are shared in long runs only, too little may have been lost to be kept.
    "swap": Feature(
        lambda seen: (
            seen.n_preempted > 0
            and seen.n_failed == 0
            and (
                seen.n_swapped > 0
                or (max(seen.chunks.values()) > 20 and seen.n_again == 0)
                or (seen.share > PAGE and seen.n_again < seen.share * seen.n_preempted)
            )
        ),
        {"prefix_cache": True},
        max_seqs=8,
        pages="few",
        batch=True,
        disk="cold",
    ),
    "n-gram draft": Feature(
        lambda seen: seen.n_accepted > 0 and seen.n_refused > 0, draft="ngram", excludes=("draft model",)
    ),
    "draft model": Feature(
        lambda seen: seen.n_accepted > 0 and seen.n_refused > 0, draft="model", in_pairs=False
    ),  # to the engine it is what the other drafter is, and takes twice as long
    "draft head": Feature(
        lambda seen: seen.n_accepted > 0 and seen.n_refused > 0,
        draft="head",
        excludes=("n-gram draft", "draft model"),
    ),
    "medusa": Feature(
        lambda seen: seen.n_accepted > 0 and seen.n_refused > 0,
        draft="medusa",
        excludes=("n-gram draft", "draft model", "draft head"),
    ),
    "own layer": Feature(
        lambda seen: seen.n_accepted > 0 and seen.n_refused > 0,
        draft="mtp",
        excludes=("n-gram draft", "draft model", "draft head", "medusa"),
        only_on=OWN_LAYER,
    ),
    "held": Feature(lambda seen: seen.n_forced > 0 and seen.n_masks > 0, held=True),
    "adapters": Feature(  # in one step with each other and with the model itself
        lambda seen: seen.n_adapted > 0 and (seen.n_beside > 0 or seen.n_preempted > 0),
        {"prefix_cache": True},
        max_seqs=8,
        batch=True,
        adapters=True,
    ),
    "forks": Feature(
        lambda seen: seen.n_shared > 0 and (seen.n_copies > 0 or seen.share > PAGE or seen.n_preempted > 0), max_seqs=4
    ),
    "beams": Feature(lambda seen: seen.beside_beams > 0 or seen.n_preempted > 0, max_seqs=4, beams=True),
} | {f"policy {name}": _policy(name, name == "priority") for name in POLICIES}


@cache
def _page_bytes(path: Path, kv_dtype: str, draft: str = "off") -> int:
    """Bytes that the memory plan takes for a page."""
    with LLM(str(path), backend="null", threads=1, kv_dtype=kv_dtype, max_context=PAGE, draft=draft) as llm:
        return PAGE * llm.plan.kv_per_token


@cache
def held_answers(path: Path, load: Load, kv_dtype: str) -> Answers:
    """The plain run of the requests that are held to forms."""
    return plain_answers(path, load.held, kv_dtype)


def plain_answers(path: Path, load: Load, kv_dtype: str) -> Answers:
    """The plain run; what forms force comes one token at a time in it."""
    with open_row(path, load.context, kv_dtype, PLENTY) as llm:
        seen = Seen(llm, forces=False)
        _drive(llm, load.requests)
        seen.answers.beams = _search(llm, load)
    assert seen.most_spans == 1
    assert (seen.n_copies, seen.n_preempted, seen.n_shared, seen.n_again, seen.n_evicted) == (0, 0, 0, 0, 0)
    assert max(seen.chunks.values()) == 1
    assert seen.n_forced == seen.n_accepted == 0
    assert not any(n for n, _, _ in seen.uses())
    return seen.answers


# which requests are asked with which adapters too
ADAPTED = (("0", "one"), ("1", "one"), ("1", "two"))
_ADAPTED: dict[tuple[Path, int, str], tuple[dict[str, str], list[Request], Answers]] = {}


def _adapted(path: Path, load: Load, kv_dtype: str, folder: Path) -> tuple[dict[str, str], list[Request], Answers]:
    """Two adapters' paths, requests with them, and what these are answered each alone: made once
    for a load.
    """
    key = path, id(load), kv_dtype
    if key not in _ADAPTED:
        with open_checkpoint(path) as checkpoint:
            spec = spec_of(checkpoint, load.context)
        some = ("attn_q", "attn_v", "ffn_down")
        lora = {
            "one": str(write_peft(folder / "one", random_updates(spec, 4, 1))),
            "two": str(write_peft(folder / "two", random_updates(spec, 7, 2, products=some))),
        }
        with open_row(path, load.context, kv_dtype, PLENTY, lora=lora) as llm:
            digests = {name: adapter.digest for name, adapter in llm._parts.adapters.items()}
            asked = [
                replace(load.requests[int(number)], request_id=f"{number}-{name}", adapter=digests[name])
                for number, name in ADAPTED
            ]
            seen = Seen(llm)
            _drive(llm, asked)
        _ADAPTED[key] = lora, asked, seen.answers
    return _ADAPTED[key]


def run_row(path: Path, load: Load, kv_dtype: str, names: Sequence[str], folder: Path) -> Seen:
    """Answer the requests with features on; `folder` is an empty one."""
    features = [FEATURES[name] for name in names]
    options: dict[str, Any] = {}
    for feature in features:
        options |= feature.options
    seqs = [feature.max_seqs for feature in features if feature.max_seqs is not None]
    options["max_seqs"] = min([*seqs, options.get("max_step_tokens", 8)]) if seqs else 1
    pages = min([getattr(load, feature.pages) for feature in features if feature.pages is not None], default=PLENTY)
    disk = next((feature.disk for feature in features if feature.disk is not None), None)
    if disk is not None:
        options["kv_disk"] = str(folder)
    draft = next((feature.draft for feature in features if feature.draft is not None), None)
    if draft is not None:
        options["draft"] = f"model={path}" if draft == "model" else draft
    if draft in ("head", "medusa", "mtp"):

        def open_(draft: str) -> LLM:
            return open_row(path, load.context, kv_dtype, PLENTY, draft=draft)

        made = fitted(path, load, kv_dtype, draft, open_, folder.with_name(f"{folder.name}-{draft}"))
        if draft == "mtp":
            path = made
        else:
            options["draft"] = f"{'eagle' if draft == 'head' else draft}={made}"
    if disk == "warm":
        with open_row(path, load.context, kv_dtype, PLENTY, **options) as llm:
            _drive(llm, load.requests)
    batch, staggered, beams = (any(getattr(f, name) for f in features) for name in ("batch", "staggered", "beams"))
    adapted: list[Request] = []
    if any(feature.adapters for feature in features):
        options["lora"], adapted, _ = _adapted(path, load, kv_dtype, folder.with_name(f"{folder.name}-adapters"))
    asked = asked_of(load, [what for f in features for what in f.around], any(f.shuffled for f in features))
    asked += adapted
    with open_row(path, load.context, kv_dtype, pages, **options) as llm:
        assert llm.plan.n_pages == pages
        seen = Seen(llm)

        def search() -> None:
            seen.answers.beams = _search(llm, load)

        if any(feature.primed for feature in features):
            _drive(llm, [replace(like(load.requests[4]), request_id="first")])
        if draft is not None:
            guesses = max(feature.guesses for feature in features)
            asked = [replace(one, params=replace(one.params, draft_tokens=guesses)) for one in asked]
        _drive(llm, asked, batch=batch, staggered=staggered, at_third=search if beams else None)
        llm.engine.scheduler.check()
    return seen


def _differences(run: Answers, plain: Answers, load: Load, adapted: Answers | None) -> list[str]:
    """Name what differs from the plain run, and from the plain run with adapters."""
    wrong = []
    for request in load.requests:
        name = request.request_id
        for other in (name, f"{name}-again"):
            if other == name or any(key[0] == other for key in run.ends):
                for what, one, two in zip(("answers", "logits"), run.of(other), plain.of(name), strict=True):
                    if one != two:
                        wrong.append(f"{what} of {other}")
    for name, adapter in ADAPTED:
        if adapted is not None and run.of(f"{name}-{adapter}") != adapted.of(f"{name}-{adapter}"):
            wrong.append(f"{name} with the adapter {adapter}")
    if run.beams is not None and run.beams != plain.beams:
        wrong.append("beams")
    return wrong


def check(path: Path, load: Load, plain: Answers, kv_dtype: str, features: Sequence[str], folder: Path) -> None:
    """Assert that a row gives the bits of the plain run, and that every feature of it happened."""
    if any(FEATURES[name].held for name in features):
        load, plain = load.held, held_answers(path, load, kv_dtype)
    seen = run_row(path, load, kv_dtype, features, folder)
    with_adapters = _ADAPTED.get((path, id(load), kv_dtype)) if "adapters" in features else None
    assert _differences(seen.answers, plain, load, with_adapters and with_adapters[2]) == []
    missing = [name for name in features if not FEATURES[name].proof(seen)]
    assert missing == [], f"features that did not happen: {missing}"


_GRAMMARS: dict[Path, dict[str, Any]] = {}


def open_row(path: Path, context: int, kv_dtype: str, pages: int, **options: Any) -> LLM:
    """An engine that is plain but for `options`. No measured time decides what happens: all steps
    take equally long.
    """
    plain = {
        "threads": 1,
        "max_seqs": 1,
        "prefix_cache": False,
        "draft": "off",
        "max_step_tokens": 256,
        "max_context": context,
    }
    draft = options.get("draft", "")
    page_bytes = _page_bytes(path, kv_dtype, draft if draft.startswith("eagle=") or draft == "mtp" else "off")
    memory = {"kv_dtype": kv_dtype, "kv_memory": pages * page_bytes}
    llm = LLM(str(path), **{**plain, **memory, **options})
    grammars = llm._parts.grammars
    # engines share compiled grammars
    grammars.__dict__.update(_GRAMMARS.setdefault(path, vars(grammars)))
    seconds = itertools.count(1)
    llm.engine.clock = llm.engine._recorder._clock = lambda: float(next(seconds))
    llm.engine.scheduler.cost.load_s = lambda n_pages: 0.0  # type: ignore[method-assign]
    return llm


def _drive(
    llm: LLM,
    asked: Sequence[Request],
    *,
    batch: bool = False,
    staggered: bool = False,
    at_third: Callable[[], None] | None = None,
) -> None:
    """Add requests: one every third step, else all at once, else each when the one before it has
    ended.
    """
    waiting = deque(asked)
    engine = llm.engine
    for step in itertools.count():
        if staggered:
            now = int(step % 3 == 0)
        else:
            now = len(waiting) if batch else int(not engine.has_work)
        for _ in range(min(now, len(waiting))):
            engine.add(waiting.popleft())
        if step == 3 and at_third is not None:
            assert engine.has_work
            at_third()
        if engine.has_work:
            engine.step()
        elif not waiting:
            return


def _search(llm: LLM, load: Load) -> Any:
    """The beams of a prompt that is also one of the requests."""
    form = BEAM_FORM if load.is_held else None
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=form is None, structured=form)
    [output] = llm.beam_search({"prompt_token_ids": list(load.requests[4].prompt_ids)}, params)
    return [(beam.token_ids, beam.cum_logprob, beam.finish_reason) for beam in output.sequences]
