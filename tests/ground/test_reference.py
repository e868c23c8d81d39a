"""What is generated is what its source says now."""

from pathlib import Path

import pytest

from mooncake_store import errors
from mooncake_store.config.settings import PROGRAMS, settings_of
from scripts import man_pages
from scripts import metrics_reference as metrics
from scripts.async_client import SOURCE, TARGET, async_client
from scripts.store_reference import PAGES

FOLDER = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name):
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run: python scripts/store_reference.py"


def test_the_page_of_metrics_is_up_to_date():
    page = metrics.PAGE.read_text(encoding="utf-8")
    assert page == metrics.metrics_page(), "run: python scripts/metrics_reference.py"


def test_what_http_ports_say_of_themselves_is_up_to_date():
    pytest.importorskip("aiohttp")
    from scripts.http_reference import PAGES as descriptions
    from scripts.http_reference import text

    assert {each.name for each in (FOLDER / "reference" / "http").iterdir()} == set(descriptions)
    for name in descriptions:
        written = (FOLDER / "reference" / "http" / name).read_text(encoding="utf-8")
        assert written == text(name), "run: python scripts/http_reference.py"


def test_the_pages_of_man_are_up_to_date():
    written = {each.name: each.read_text(encoding="utf-8") for each in man_pages.FOLDER.iterdir()}
    assert written == man_pages.pages(), "run: python -m scripts.man_pages"


def test_every_setting_has_its_place_in_the_page():
    page = PAGES["reference/config.md"]()
    for setting in (setting for program in PROGRAMS for setting in settings_of(program)):
        assert page.count(f"\n### {setting.table}.{setting.name}\n") == 1
        assert setting.text in page


def test_every_error_has_its_row_and_its_place_in_the_tree():
    page = PAGES["reference/errors.md"]()
    for name in errors.__all__:
        assert page.count(f"| `{name}` | {getattr(errors, name).code} |") == 1
        assert f" {name}\n" in page or f"\n{name}\n" in page


def test_the_asyncio_client_is_made_from_the_blocking_one():
    made = async_client(SOURCE.read_text(encoding="utf-8"))
    assert TARGET.read_text(encoding="utf-8") == made, "run: python scripts/async_client.py"


def test_an_operation_that_is_added_waits_in_the_asyncio_client():
    added = SOURCE.read_text(encoding="utf-8").replace(
        "    # Puts.\n",
        "    def twice(self, key: Key) -> bytes:\n"
        "        return self.get(key) + self.get(key)\n\n"
        "    # Puts.\n",
    )
    made = async_client(added)
    assert "    async def twice(self, key: Key) -> bytes:\n" in made
    assert "        return await self.get(key) + await self.get(key)\n" in made
