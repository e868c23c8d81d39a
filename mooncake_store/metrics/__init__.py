"""Figures for Prometheus: what families there are, what each program tells, and how it is written.

`families` declares each once; docs/reference/metrics.md, the dashboard and the alerts are held to
that table. What is counted where requests are answered costs nothing per key: `times`.
"""

__all__: list[str] = []
