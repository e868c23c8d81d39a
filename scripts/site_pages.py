"""Which files are pages of the site, in which order, and what is changed in them for it.

Hooks of MkDocs, named in mkdocs.yml. Every document stays where it is in the repository, with links
that work there; the site has the same tree, so that they work in it as well. A source file that a
page links to becomes a page that shows it. The order is that of docs/README.md: there is no second
list that could say something else. O(bytes of all pages).
"""

from __future__ import annotations

import re
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["navigation", "on_config", "on_files", "on_page_markdown", "pages"]

ROOT = Path(__file__).resolve().parents[1]
START = "docs/README.md"
SECTIONS = {
    "Guide": r"docs/guide/",
    "Operating": r"docs/operating/",
    "Reference": r"docs/reference/",
    "Internals": r"docs/(internals/|ARCHITECTURE)",
    "Packages": r".*/README.md",
    "Project": r"",
}
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=(#[^)\s]*)?\))")
FENCE = re.compile(r"^( *```\w+) [^\n`]*$", re.MULTILINE)
CODE_IN_TABLE = re.compile(r"(?<=`)[^`\n]*\\\|[^`\n]*(?=`)")


def pages() -> list[str]:
    """The documents, by their path in the repository."""
    inner = ROOT.glob("docs/**/*.md")
    others = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), *ROOT.glob("serving/*/README.md")]
    found = {path.relative_to(ROOT).as_posix() for path in (*inner, *others)}
    # The first is for PyPI, which has no other pages.
    return sorted(found - {"docs/package.md"})


def navigation() -> list[Any]:
    """The pages by section: in the order of docs/README.md, then those that it does not name."""
    linked = [path for path in _links(START) if path.endswith(".md")]
    sections: list[Any] = [{"Home": "README.md"}, {"Documents": START}]
    left = dict.fromkeys(path for path in [*linked, *pages()] if path not in (START, "README.md"))
    for title, pattern in SECTIONS.items():
        inside = [path for path in left if re.match(pattern, path)]
        sections.append({title: inside})
        for path in inside:
            del left[path]
    return sections


def on_config(config: Any) -> Any:
    """Give MkDocs the navigation, and leave out what needs to know the address of the site."""
    config.nav = navigation()
    config.theme.static_templates.clear()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Put the repository's tree in the place of the folder that MkDocs took for the whole."""
    from mkdocs.structure.files import File, InclusionLevel

    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    documents = pages()
    pictures = (path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.*"))
    for path in [*documents, *(each for each in pictures if not each.endswith(".md"))]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for source in sorted({path for page in documents for path in _sources(page)}):
        text = (ROOT / source).read_text(encoding="utf-8")
        language = "python" if source.endswith(".py") else "text"
        shown = f"---\nsearch: {{exclude: true}}\n---\n# {source}\n\n````{language}\n{text}\n````\n"
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, f"{source}.md", content=shown, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Say what code hosts understand as MkDocs does."""
    path = page.file.src_uri
    if path not in pages():
        return markdown
    # What follows the language is for the tests that run the blocks.
    markdown = FENCE.sub(r"\1", markdown)
    markdown = CODE_IN_TABLE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return LINK.sub(lambda link: _target(path, link["target"]), markdown)


def _target(page: str, target: str) -> str:
    """Where a link of a page leads in the site."""
    source = _source(normpath(Path(page).parent / target))
    if not source:
        return target
    up = "../" * (len(Path(page).parts) - 1)
    return f"{up}{source}.md"


def _source(path: str) -> str:
    """The file that is shown for a link to `path`, if that is neither a page nor a picture."""
    if (ROOT / path).is_dir():
        package = f"{path}/__init__.py"
        return package if (ROOT / package).exists() else ""
    outside = not path.startswith("docs/") and not path.endswith(".md")
    return path if outside and (ROOT / path).exists() else ""


def _links(page: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return (normpath(Path(page).parent / found["target"]) for found in LINK.finditer(text))


def _sources(page: str) -> Iterator[str]:
    return filter(None, map(_source, _links(page)))
