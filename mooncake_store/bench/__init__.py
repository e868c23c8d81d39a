"""Benchmarks: one module per bench, each with one function that fills a report.

    def run(report: Report, *, quick: bool, vs: tuple[str, ...], **own_options) -> None

`mooncake bench <name>` finds the module by its name: a bench is a file here and a line of the table
in `mooncake_store/cli/bench.py`. What benches share is in `harness`, in `parts` and in `sides`.
"""
