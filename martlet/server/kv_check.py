"""How far answers are from those with f16 pages: a share of them is computed again, while nothing else is to be done.

An answer's logits are the same bits whenever they are computed, so nothing has to be kept of them: prompt and answer go through
the model once more with the served KV types and once with f16, in a memory of their own, four rows at a time. A request that
comes meanwhile waits for those four rows. One check is waiting or under way at most; who is not taken is counted, with why.
Read `observe/kv_quality.py` next: what is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from martlet.config import Origin
from martlet.engine.build import Built
from martlet.engine.outputs import RequestOutput
from martlet.errors import RequestError
from martlet.kv_types import parse_kv_types
from martlet.observe.kv_quality import join, parts_of
from martlet.server.prometheus import Histogram
from martlet.types import Request

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["KvCheck", "KvChecked"]

MOST_TOKENS = 2048  # of a prompt and its answer; bounds the memory
ROWS = 4  # that are computed at a time: a request that comes may wait for so many, twice
BASE = parse_kv_types("f16")
_DIVERGENCE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
logger = logging.getLogger("martlet.server")


class KvChecked:
    """What checks have found; `skipped` is the event loop's to write, all else the engine thread's."""

    def __init__(self) -> None:
        self.divergence = Histogram(_DIVERGENCE)  # of answers: the mean over their tokens
        self.n_tokens = self.n_same_best = 0
        self.skipped = dict.fromkeys(("busy", "long", "adapter", "failed"), 0)

    def families(self, prefix: str, model: str) -> Iterator[Metric]:
        """For Prometheus."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        labels, values = ("model_name",), (model,)
        text = "Mean divergence of a checked answer's tokens from f16 KV pages, in nats."
        spread = HistogramMetricFamily(f"{prefix}:kv_check_divergence", text, labels=labels)
        spread.add_metric(values, buckets=self.divergence.cumulative(), sum_value=self.divergence.total)
        yield spread
        for name, count, text in (
            ("kv_check_tokens", self.n_tokens, "Tokens of checked answers."),
            ("kv_check_same_best_tokens", self.n_same_best, "Of them, those where f16 pages have the same best token."),
        ):
            counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=labels)
            counter.add_metric(values, count)
            yield counter
        text = "Answers whose turn it was and that were not checked, by the reason."
        skipped = CounterMetricFamily(f"{prefix}:kv_check_skipped", text, labels=(*labels, "reason"))
        for reason, count in self.skipped.items():
            skipped.add_metric((*values, reason), count)
        yield skipped


class KvCheck:
    """Chooses the answers and checks them."""

    def __init__(self, share: float, built: Built, counted: KvChecked, spare: Callable[[Iterator[None]], bool]) -> None:
        """`spare` takes work that is done piece by piece while the engine has none, and says whether it does.

        Raises RequestError where there is nothing to check.
        """
        self._types = parse_kv_types(built.config.kv_dtype)
        chosen = built.config.origins.get("kv_dtype", (Origin.DEFAULT,))[0] is Origin.MEASURED
        if built.lens is None:
            raise RequestError(
                f"kv_check_share is {share:g}, and the {built.config.backend} backend computes nothing that could be"
                " checked: leave it out.",
                param="kv_check_share",
            )
        if not (self._types.is_compressed or chosen):
            raise RequestError(
                f"kv_check_share is {share:g}, and kv_dtype {built.config.kv_dtype} compresses nothing that could be"
                " checked: give kv_dtype q4 or q8, or leave kv_check_share out.",
                param="kv_check_share",
            )
        self._share, self._due = share, 0.0
        self._most = min(MOST_TOKENS, built.plan.context)
        self._lens = built.lens(self._most, ROWS)
        self._counted, self._spare = counted, spare
        for _ in parts_of(self._lens, BASE, self._types, [0, 0]):  # kernels are compiled here, not beside requests
            pass

    def ended(self, request: Request, output: RequestOutput) -> None:
        """An answer is whole: every so many, one is checked. In the event loop."""
        self._due += self._share
        if self._due < 1:
            return
        self._due -= 1
        if (reason := self._why_not(request, output)) is not None:
            self._counted.skipped[reason] += 1

    def _why_not(self, request: Request, output: RequestOutput) -> str | None:
        """Check it, or say why that cannot be."""
        answer = output.outputs[0]
        ids, n_prompt = [*output.prompt_token_ids, *answer.token_ids], len(output.prompt_token_ids)
        if answer.finish_reason not in ("stop", "length") or len(ids) == n_prompt:
            return "failed"
        if request.adapter:
            return "adapter"
        if len(ids) > self._most:
            return "long"
        return None if self._spare(self._check(ids, n_prompt)) else "busy"

    def _check(self, ids: Sequence[int], n_prompt: int) -> Iterator[None]:
        """In the engine's thread, piece by piece."""
        parts = []
        for part in parts_of(self._lens, BASE, self._types, ids):
            parts.append(part)
            yield
        found = join(parts).between(n_prompt - 1, len(ids))
        kld, n_same = float(found.kld.mean()), int(found.agree.sum())
        self._counted.divergence.observe(kld)
        self._counted.n_tokens += len(found.kld)
        self._counted.n_same_best += n_same
        logger.info(
            "kv check: %d tokens after %d, divergence from f16 %.5f, same best token %.1f %%",
            len(found.kld), n_prompt, kld, 100 * n_same / len(found.kld),
        )  # fmt: skip
