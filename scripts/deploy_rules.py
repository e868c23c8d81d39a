"""Write deploy/kubernetes/monitoring/rules.yaml: the alerts of deploy/prometheus for its operator.

    python scripts/deploy_rules.py

The operator takes the same groups in an object of its own. A test compares the two.
"""

from pathlib import Path

import yaml

__all__ = ["PAGE", "page"]

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
PAGE = DEPLOY / "kubernetes" / "monitoring" / "rules.yaml"
HEAD = "# Written by `python scripts/deploy_rules.py`; edit deploy/prometheus/alerts.yml.\n"


def page() -> str:
    """The text of the file."""
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    rules = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "mooncake"},
        "spec": alerts,
    }
    return HEAD + yaml.safe_dump(rules, sort_keys=False, width=1000)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
