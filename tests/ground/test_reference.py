"""The reference pages say what the code does."""

from pathlib import Path

import pytest

from mooncake_store import errors
from mooncake_store.config import PROGRAMS, describe
from scripts.store_reference import PAGES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name):
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run: python scripts/store_reference.py"


def test_every_setting_has_its_place_in_the_page():
    page = PAGES["config.md"]()
    for setting in (setting for program in PROGRAMS for setting in describe(program)):
        assert page.count(f"\n### {setting.table}.{setting.name}\n") == 1
        assert setting.text in page


def test_every_error_has_its_row_and_its_place_in_the_tree():
    page = PAGES["errors.md"]()
    for name in errors.__all__:
        assert page.count(f"| `{name}` | {getattr(errors, name).code} |") == 1
        assert f" {name}\n" in page or f"\n{name}\n" in page
