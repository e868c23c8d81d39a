"""What is wrong with a site as it was built: links that lead nowhere, and what is not on it.

    python scripts/site_links.py FOLDER

Follows every link inside the folder, to the anchor. What it links to elsewhere is not asked for,
only that it is an https address; what a page needs to be shown has to be in the folder. A list or
a table that came out as text is a fault as well: code hosts do without the empty line above it that
the site's Markdown wants. O(bytes of all pages).
"""

from __future__ import annotations

import os
import re
import sys
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["complaints"]

ELSEWHERE = re.compile(r"https://[a-z0-9.-]+\.[a-z]+(/\S*)?|mailto:\S+@\S+")
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "srcset"}
LOADED_BY_STYLES = re.compile(r"""url\(\s*['"]?(?:https?:)?//|@import\s+['"]?(?:https?:)?//""")
NOT_MARKDOWN = re.compile(r"^\s*([-*] |\d+\. |\|.*\|\s*$|```)", re.MULTILINE)


class _Page(HTMLParser):
    """The links, the anchors and the text of one page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif LOADED.get(tag) in given:
            self.loads.append(given[LOADED[tag]])
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


def complaints(folder: Path) -> list[str]:
    """What is wrong, a line for each, in the order of the pages."""
    html = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html"))}
    site = {path.relative_to(folder).as_posix(): _Page(text) for path, text in html.items()}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = [] if site else [f"{folder}: no pages"]
    for name, page in site.items():
        found += [f"{name}: {what}" for what in _wrong(name, page, site, files)]
    for style in sorted(folder.rglob("*.css")):
        if LOADED_BY_STYLES.search(style.read_text(encoding="utf-8")):
            found.append(f"{style.relative_to(folder)}: loads something from elsewhere")
    return found


def _wrong(name: str, page: _Page, site: dict[str, _Page], files: set[str]) -> list[str]:
    found = []
    for link in dict.fromkeys((*page.links, *page.loads)):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if link in page.loads and parts.scheme != "data":
                found.append(f"loads {link}, which is not in the site")
            elif link in page.links and not ELSEWHERE.fullmatch(link):
                found.append(f"links to {link}, which is no https address")
            continue
        path = unquote(parts.path)
        goal = normpath(os.path.join(os.path.dirname(name), path)) if path else name
        if goal not in files:
            found.append(f"links to {link}: there is no {goal}")
        elif parts.fragment and goal in site and unquote(parts.fragment) not in site[goal].anchors:
            found.append(f"links to {link}: {goal} has no such anchor")
    stray = filter(None, map(NOT_MARKDOWN.search, page.paragraphs))
    found += [f"shows {each[0].strip()!r} as text: put an empty line above it" for each in stray]
    return found


if __name__ == "__main__":
    wrong = complaints(Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.exit(bool(wrong))
