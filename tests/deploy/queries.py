"""The queries of the dashboard and the alerts, and what of them the table of families knows."""

import json
import re

from mooncake_store.metrics.families import FAMILIES
from tests.sources import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "mooncake.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
GIVEN = {"up": {"job", "instance"}}
"""What Prometheus itself tells."""
TARGET = {"job", "instance"}
"""Labels that a scrape adds to every sample."""
_WORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "offset"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\[[^\]]*\])?\s*(\(?)")
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def dashboard_queries():
    """Every query of the dashboard, those of its variables included."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    variables = [each for each in dashboard["templating"]["list"] if each["type"] == "query"]
    asked = (re.fullmatch(r"label_values\((.+), \w+\)", each["definition"]) for each in variables)
    return [*queries, *(match[1] for match in asked)]


def alerts():
    """The query of each alert, by its name."""
    found, name = {}, None
    for line in ALERTS.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\s+- alert: (\w+)$", line):
            name = match[1]
        elif match := re.match(r"\s+expr: (.+)$", line):
            found[name] = match[1]
    return found


def complaints(query):
    """What of a query no program tells: names, labels, and values of labels."""
    found = []
    rest = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", query)
    for name, matchers, _, call in _SELECTOR.findall(rest):
        if call or name in _WORDS:
            continue
        family = FAMILIES.get(name)
        if family is None and (match := re.fullmatch(r"(.+)_(bucket|sum|count)", name)):
            family = FAMILIES.get(match[1])
            if family is not None and family.kind != "histogram":
                family = None
        if family is None and name not in GIVEN:
            found.append(f"nobody tells {name}")
            continue
        labels = {} if family is None else family.labels
        for label, operator, value in _MATCHER.findall(matchers):
            values = labels.get(label)
            if values is None and label not in TARGET:
                found.append(f"{name} has no label {label}")
            elif isinstance(values, tuple):
                wanted = value.split("|") if "~" in operator else [value]
                unknown = [each for each in wanted if each not in values]
                found += [f"no {label} of {name} is {each}" for each in unknown]
    return found


def grouped(query):
    """The labels by which a query groups."""
    lists = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", query)
    return {label.strip() for each in lists for label in each.split(",")}
