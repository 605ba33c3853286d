"""Workloads follow from their seed, a run's numbers from its clock, and unequal reports are not
compared (asks row 42).
"""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from martlet import toy
from martlet.bench.drive import drive
from martlet.bench.report import chart, compare, summary, table
from martlet.bench.svg import line_chart
from martlet.bench.workloads import Arrival, Workload, arrivals
from martlet.cli import main
from martlet.errors import MartletError, RequestError
from tests.observe.test_metrics import Clock, make

PREFIX = Workload("prefix", 4, 2, prompt_tokens=3, gen_tokens=2, shared_tokens=5, seed=3)
LATENCY = Workload("latency", 200, 16, prompt_tokens=2, gen_tokens=1, rate=4.0, intrusion_tokens=50)


class TestArrivals:
    def test_the_seed_decides(self) -> None:
        assert arrivals(PREFIX, 100) == arrivals(PREFIX, 100)
        assert arrivals(PREFIX, 100) != arrivals(Workload("prefix", 4, 2, 3, 2, 5, seed=4), 100)

    def test_prompts_share_their_start_and_nothing_else(self) -> None:
        found = arrivals(PREFIX, 10**9)
        assert len({a.ids[:5] for a in found}) == 1
        assert len({a.ids[5] for a in found}) == 4
        assert {len(a.ids) for a in found} == {8}
        assert all(a.at_s is None and a.max_tokens == 2 for a in found)

    def test_poisson_arrivals(self) -> None:
        """200 arrivals at 4 a second take 50 s in the mean, with a standard deviation of 3.5 s."""
        found = arrivals(LATENCY, 100)
        times = [a.at_s for a in found if a.at_s is not None]
        assert times == sorted(times)
        assert 36 < times[-1] < 64
        gaps = [b - a for a, b in itertools.pairwise(times)]
        # half are below the median
        assert sum(gap < 0.25 * 0.6931 for gap in gaps) == pytest.approx(100, abs=30)

    def test_the_long_prompt_comes_midway(self) -> None:
        found = arrivals(LATENCY, 100)
        assert [a.name for a in found].index("long") == 100
        assert len(found[100].ids) == 50
        assert len(found) == 201

    def test_positions(self) -> None:
        assert PREFIX.longest == 11  # 5 + 3 + 2, and one
        assert PREFIX.tokens_at_a_time == 22


class TestDrive:
    def test_a_closed_loop_keeps_its_concurrency(self) -> None:
        """Four requests, two at a time, of one prompt token and two answers: 1 s and 0.25 s a row;
        two steps each pair.
        """
        engine = make(Clock())
        requests = [Arrival(str(n), (n,), 2) for n in range(4)]
        run = drive(engine, requests, 2)
        assert run.n_steps == 4
        assert run.seconds == 4 * 1.5
        assert [done.metrics.ttft_s for done in run.done] == [1.5] * 4
        assert [done.metrics.arrival_s for done in run.done] == [100, 100, 103, 103]

    def test_a_request_is_due_when_it_is_due(self) -> None:
        """The driver is inside a step of 1.25 s when the second request arrives at 0.5 s: its wait
        counts from there.
        """
        engine = make(Clock())
        run = drive(engine, [Arrival("a", (1,), 3, 0.0), Arrival("b", (1,), 1, 0.5)], 1)
        assert run.done[1].metrics.arrival_s == 100.5
        assert run.done[1].metrics.queue_s == 0.75

    def test_a_request_that_ends_early_is_no_result(self) -> None:
        engine = make(Clock())
        engine.scheduler._eos_ids = frozenset({0})
        with pytest.raises(MartletError, match="expected 64"):
            drive(engine, [Arrival("a", (1,), 64)], 1)  # the context of 32 ends it


class TestReport:
    def report(self, **changed: object) -> dict[str, object]:
        run = drive(make(Clock()), [Arrival(str(n), (n, n), 3) for n in range(4)], 2)
        workload = Workload("throughput", 4, 2, 2, 3)
        return summary(workload, run, {"file": "m.gguf", "fingerprint": "f"}, {"threads": 2}) | changed

    def test_numbers(self) -> None:
        """Pairs in steps of 4 rows, then 2 and 2: 2 + 1.5 + 1.5 s, twice; 12 tokens."""
        found = self.report()
        assert found["seconds"] == 10
        assert found["generated_tokens"] == 12
        assert found["generated_tokens_per_s"] == 1.2
        assert found["all_tokens_per_s"] == 2.0
        assert found["ttft_ms"] == {"p50": 2000, "p95": 2000, "p99": 2000, "max": 2000}
        assert found["gap_ms"] == {"p50": 1500, "p95": 1500, "p99": 1500, "max": 1500}
        assert found["cache_hit_rate"] == 0
        assert "1.2 tokens/s generated" in table(found)
        assert "empty at the start" in table(found)

    def test_equal_reports_are_compared(self) -> None:
        slower = self.report(generated_tokens_per_s=0.6)
        assert "tokens/s   2.00" in compare(self.report(), slower, "old.json")

    @pytest.mark.parametrize(
        ("part", "key"), [("workload", "gen_tokens"), ("workload", "seed"), ("settings", "threads"), ("model", "file")]
    )
    def test_unequal_reports_are_refused_by_name(self, part: str, key: str) -> None:
        other = self.report()
        other[part] = {**other[part], key: "other"}  # type: ignore[dict-item]
        with pytest.raises(RequestError, match=f"{part}.{key}: 'other' there"):
            compare(self.report(), other, "old.json")

    def test_another_cache_state_is_refused(self) -> None:
        with pytest.raises(RequestError, match="'warm' there"):
            compare(self.report(), self.report(cache="warm"), "old.json")

    @pytest.mark.parametrize("name", ["throughput", "latency", "prefix"])
    def test_charts_are_svg(self, name: str) -> None:
        run = drive(make(Clock()), [Arrival(str(n), (n, n), 3) for n in range(4)], 2)
        root = ET.fromstring(chart(Workload(name, 4, 2, 2, 3), run))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


class TestChart:
    def test_points_lie_between_round_ticks(self) -> None:
        """x from 0 to 10 and y from 0 to 100: the corner (10, 100) is the plot's corner."""
        root = ET.fromstring(line_chart("a & b", "x", "y", {"s": [(0, 0), (10, 100)]}))
        space = "{http://www.w3.org/2000/svg}"
        [line] = root.iter(f"{space}polyline")
        assert line.get("points") == "70.0,330.0 740.0,40.0"
        texts = [t.text for t in root.iter(f"{space}text")]
        assert {"a & b", "0", "2", "10", "20", "100"} <= set(texts)

    def test_no_points(self) -> None:
        ET.fromstring(line_chart("", "", "", {}))
        ET.fromstring(line_chart("", "", "", {"one": [(5, 0)]}, dots=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("bench") / "tiny.gguf"))


class TestCommand:
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("throughput", ["--concurrency", "3"]),
            ("latency", ["--rate", "500", "--intrusion", "40"]),
            ("prefix", ["--shared", "64", "--concurrency", "2"]),
        ],
    )
    def test_report_and_chart(
        self, kind: str, options: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        common = ["--requests", "6", "-p", "8", "-n", "4", "--backend", "null", *options]
        out = tmp_path / "report"
        assert main(["bench", kind, model, *common, "--out", str(out), "--trace", str(tmp_path / "t.json")]) == 0
        said = capsys.readouterr().out
        assert "time to first token" in said
        found = json.loads(out.with_suffix(".json").read_text())
        assert found["generated_tokens"] == 4 * (7 if kind == "latency" else 6)
        assert found["preemptions"] == 0
        ET.parse(out.with_suffix(".svg"))
        assert json.loads((tmp_path / "t.json").read_text())
        assert main(["bench", kind, model, *common, "--json", "--compare", f"{out}.json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["workload"] == found["workload"]
        assert "this ÷ that" in captured.err
        assert main(["bench", kind, model, *common, "--seed", "1", "--compare", f"{out}.json"]) == 2
        assert "workload.seed: 0 there, 1 here" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["bench", "latancy", "m"], "Did you mean 'latency'"),
            (["bench", "latency"], "expected one of speed, throughput, latency, prefix"),
            (["bench", "prefix", "m", "--rate", "3"], "--rate is of no use for bench prefix"),
            (["bench", "throughput", "m", "--depth", "3"], "--depth is of no use for bench throughput"),
            (["bench", "m", "--shared", "3"], "--shared is of no use for bench speed"),
            (["bench", "latency", "m", "--rate", "0"], "from 0.001"),
            (["bench", "latency", "m", "-n", "0"], "gen_tokens is 0; expected 1 or more"),
        ],
    )
    def test_wrong_usage(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err

    def test_what_is_no_report(self, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.json").write_text("[]")
        assert main(["bench", "prefix", model, "--compare", str(tmp_path / "x.json")]) == 2
        assert "not a report" in capsys.readouterr().err
