"""The site of the documents: which pages, in which order, and what its checker finds."""

import json
from types import SimpleNamespace

import pytest

from scripts.docs_site import list_versions
from scripts.site_links import complaints
from scripts.site_pages import navigation, on_page_markdown, pages
from tests.sources import ROOT, files

GOOD = """<html><head><link rel="stylesheet" href="style.css"></head>
<body><a href="other/index.html#part">part</a> <a href="https://example.org/a?b=c">far</a>
<img src="data:image/png;base64,AAAA"> <p>A paragraph of two lines,
with 1.5 in it.</p></body></html>
"""
OTHER = '<html><body><h1 id="part">Part</h1><a href="../index.html">up</a></body></html>'


@pytest.fixture
def site(tmp_path):
    """A site of two pages in which nothing is wrong."""
    (tmp_path / "other").mkdir()
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "other" / "index.html").write_text(OTHER)
    (tmp_path / "style.css").write_text("body { background: url(picture.png) }")
    return tmp_path


def test_a_site_whose_links_all_lead_somewhere_is_not_complained_of(site):
    assert complaints(site) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("other/index.html#part", "other/page.html", "there is no other/page.html"),
        ("other/index.html#part", "other/", "there is no other"),
        ("#part", "#parts", "other/index.html has no such anchor"),
        ("other/index.html#part", "#part", "index.html has no such anchor"),
        ("https://example.org/a?b=c", "http://example.org/", "which is no https address"),
        ("style.css", "https://example.org/style.css", "which is not in the site"),
        ("data:image/png;base64,AAAA", "//example.org/a.png", "which is not in the site"),
        ("two lines,\nwith", "two lines,\n- with", "shows '-' as text"),
        ("two lines,\nwith", "two\n| a | b |\nwith", "shows '| a | b |' as text"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(site, right, wrong, said):
    assert right in GOOD
    (site / "index.html").write_text(GOOD.replace(right, wrong))
    (complaint,) = complaints(site)
    assert complaint.startswith("index.html: ")
    assert said in complaint


def test_a_style_sheet_that_loads_from_elsewhere_is_found(site):
    (site / "style.css").write_text("@font-face { src: url(https://example.org/font.woff2) }")
    assert complaints(site) == ["style.css: loads something from elsewhere"]


def test_a_folder_without_pages_is_no_site(tmp_path):
    assert complaints(tmp_path) == [f"{tmp_path}: no pages"]


def test_every_page_is_in_the_navigation_once_in_the_order_of_the_index():
    first, second, *sections = navigation()
    assert [*first.values(), *second.values()] == ["README.md", "docs/README.md"]
    inside = {title: each for section in sections for title, each in section.items()}
    assert sorted(path for each in inside.values() for path in each) == [
        path for path in pages() if path not in ("README.md", "docs/README.md")
    ]
    assert inside["Guide"][:2] == ["docs/guide/first-hour.md", "docs/guide/installing.md"]
    assert inside["Project"][0] == "SECURITY.md"
    assert "alloc/README.md" in inside["Packages"]


def test_every_document_is_a_page():
    documents = {str(path) for path in files(".md")}
    assert documents - set(pages()) == {"docs/package.md"}
    assert set(pages()) <= documents


def shown(markdown, page="docs/internals/serving.md"):
    return on_page_markdown(markdown, page=SimpleNamespace(file=SimpleNamespace(src_uri=page)))


@pytest.mark.parametrize(
    ("written", "built"),
    [
        ("[a](../../alloc/share.py)", "[a](../../alloc/share.py.md)"),
        ("[a](../../serving/engine)", "[a](../../serving/engine/__init__.py.md)"),
        ("[a](scale.md#b)", "[a](scale.md#b)"),
        ("[a](../pictures/serve-dark.png)", "[a](../pictures/serve-dark.png)"),
        ("[a](https://example.org/b.py)", "[a](https://example.org/b.py)"),
        ("```python no-run: needs a GPU\nx\n```\n", "```python\nx\n```\n"),
        ("  ```console run\n  $ x\n  ```\n", "  ```console\n  $ x\n  ```\n"),
        ("| `a\\|b` | c \\| d |", "| `a|b` | c \\| d |"),
    ],
)
def test_what_code_hosts_understand_is_said_as_the_site_wants_it(written, built):
    assert shown(written) == built


def test_the_newest_version_is_the_one_that_a_site_leads_to(tmp_path):
    for name in ("0.9.0", "0.10.0", "1.0.0", "0.2.11"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    assert list_versions(tmp_path) == ["1.0.0", "0.10.0", "0.9.0", "0.2.11"]
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["1.0.0", "0.10.0", "0.9.0", "0.2.11"]
    assert 'url=1.0.0/index.html"' in (tmp_path / "index.html").read_text()


def test_nothing_is_fetched_to_build_or_to_read_it():
    configured = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in configured
    assert "://" not in configured
