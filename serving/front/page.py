"""The page that shows a front at work: one file, no resource of anybody else.

It asks `/stats` twice a second. The file lies beside this one, so that editors know it is HTML.
"""

from __future__ import annotations

from importlib import resources

__all__ = ["PAGE"]

PAGE = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
"""The text of the page."""
