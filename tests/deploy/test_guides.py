"""The guide to errors names those that there are, by their numbers, and has a part for each."""

import re

from mooncake_store import errors
from tests.sources import ROOT

PAGE = (ROOT / "docs/operating/troubleshooting.md").read_text(encoding="utf-8")


def test_errors_have_their_numbers():
    rows = re.findall(r"^\| `(\w+)` \| (-\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 10
    for name, number in rows:
        assert getattr(errors, name).code == int(number), name
        assert re.search(rf"^## .*\b{name}\b", PAGE, re.MULTILINE), name
