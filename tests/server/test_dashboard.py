"""docs/grafana.json asks for metrics that the server has, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from martlet.toy import spell
from tests.server.serving import serving

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def test_every_metric_of_the_dashboard_is_there() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [v["query"]["query"] for v in dashboard["templating"]["list"] if isinstance(v["query"], dict)]
    with serving(spell("abc")) as served:
        served.chat()
        text = served.http.get("/metrics").text
    there = set(re.findall(r"^(martlet:\w+)\{", text, re.MULTILINE))
    wanted = {name for expr in asked for name in re.findall(r"martlet:\w+", expr)}
    assert len(wanted) > 12
    assert wanted <= there
    labels = set(re.findall(r'(\w+)="', text))
    used = {name for expr in asked for names in re.findall(r"by \(([^)]*)\)", expr) for name in names.split(", ")}
    assert used <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
