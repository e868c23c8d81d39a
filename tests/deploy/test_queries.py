"""The dashboard and the alerts ask for what is told, and each alert is explained."""

import json
import re

import pytest

from mooncake_store.metrics.families import FAMILIES
from tests.deploy.queries import DASHBOARD, TARGET, alerts, complaints, dashboard_queries, grouped
from tests.sources import ROOT

QUERIES = [*dashboard_queries(), *alerts().values()]
LABELS = {label for family in FAMILIES.values() for label in family.labels} | TARGET | {"le"}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_is_told(query):
    assert complaints(query) == []
    assert grouped(query) <= LABELS


@pytest.mark.parametrize(("query", "complaint"), [
    ("rate(mooncake_key_total[5m])", ["nobody tells mooncake_key_total"]),
    ("mooncake_objects_bucket", ["nobody tells mooncake_objects_bucket"]),
    ('sum by (le) (rate(mooncake_request_seconds_bucket{operation="get"}[$__interval]))', []),
    ('mooncake_objects{status="readable"}', ["mooncake_objects has no label status"]),
    ('mooncake_objects{state="there"}', ["no state of mooncake_objects is there"]),
    ('mooncake_hits_total{tier=~"memory|tape"} > 0', ["no tier of mooncake_hits_total is tape"]),
    ("mooncake_ready == 0 or lost", ["nobody tells lost"]),
    ("histogram_quantile(0.9, mooncake_request_seconds)", []),
])  # fmt: skip
def test_what_nobody_tells_is_seen(query, complaint):
    assert complaints(query) == complaint


def test_the_queries_are_found():
    assert len(dashboard_queries()) >= 40
    assert len(alerts()) >= 15


def test_every_alert_has_its_row_in_the_guide():
    guide = (ROOT / "docs" / "operating" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Mooncake\w+)` \|", guide, re.MULTILINE)
    assert rows == list(alerts())


def test_panels_of_the_dashboard_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
