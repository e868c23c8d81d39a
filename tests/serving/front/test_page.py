"""The page in a real browser, over a conductor with workers that compute nothing."""

import asyncio
import contextlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from mooncake_store.page.assets import paths_of
from serving.front import pages
from serving.workers import protocol as p
from tests.browser import CONTRASTS, Browser, installed
from tests.serving.fakes import CARD, FakeWorker, Fleet
from tests.serving.front.conftest import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "A prompt of some words, long enough for a block or two."
HOSTILE = '<img src=x onerror="document.title=1"></td><script>document.title=2</script>'
LIVE = "document.body?.dataset.state == 'live'"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with Browser(installed()) as running:
        yield running


@contextlib.asynccontextmanager
async def asking(url):
    """A function that sends a request and returns its status; those under way end with it."""
    timeout, tasks = aiohttp.ClientTimeout(60), set()

    async def ask(**body):
        async with http.post(url + "/v1/completions", json={"prompt": PROMPT} | body) as answer:
            await answer.read()
            return answer.status

    def start(**body):
        task = asyncio.ensure_future(ask(**body))
        tasks.add(task)
        return task

    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            yield start
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def tile(title):
    """What a tile shows, as an expression."""
    return (
        "[...document.querySelectorAll('#tiles > div')]"
        f".find((one) => one.firstChild.textContent == {title!r}).innerText"
    )


def pill(text):
    return f"[...document.querySelectorAll('.pill')].some((one) => one.innerText == {text!r})"


async def test_a_request_is_shown_in_each_of_its_stages(browser):
    fleet = Fleet(prefill=1, decode=1)
    worker, decode = fleet.prefill[0], fleet.decode[0]
    worker.pool_tokens, worker.own_tokens, worker.lent_tokens = 48, 16, 8
    steps = [("queue", worker, "prefill"), ("transfer", worker, "transfer"),
             ("decode", decode, "token 2")]  # fmt: skip
    held = [each.holding(stage) for _, each, stage in steps]
    async with serving(fleet) as (url, _), asking(url) as ask:
        page = await browser.open(url)
        await page.until(LIVE)
        answer = ask(max_tokens=5)
        for (shown, _, _), (_, go) in zip(steps, held, strict=True):
            await page.until(pill(shown))
            await page.until(f"{tile('Under way')}.includes('{shown} 1')")
            go.set()
        assert await answer == 200
        await page.until(pill("answered"))
        await page.until(f"{tile('Answered')}.includes('5 tokens')")
        bars = await page.see("[...document.querySelectorAll('#requests .bar')].map("
                              "(one) => one.getAttribute('aria-label'))")  # fmt: skip
        sources, times = bars
        assert sources == "own memory 16, another worker 8, pool 24, computed 8"
        assert [each.split()[0] for each in times.split(", ")] == [
            "queue", "load", "prefill", "transfer", "decode",
        ]  # fmt: skip
        assert "86" in await page.until(f"{tile('Hit rate')}.includes('86') && {tile('Hit rate')}")
        assert page.complaints == []
        # What the page needs comes from where it is.
        assert {urlsplit(each).netloc for each in page.requests} == {urlsplit(url).netloc}


async def test_refusals_are_shown_by_reason_and_can_be_picked_out(browser):
    async with serving(Fleet(prefill=1, decode=1)) as (url, conductor), asking(url) as ask:
        assert await ask(max_tokens=2) == 200
        conductor.requests_max = 0
        assert [await ask(), await ask()] == [429, 429]
        page = await browser.open(url)
        await page.until(f"{tile('Refused')}.includes('queue full 2')")
        charts = "[...document.querySelectorAll('figure')].map((one) => one.innerText).join()"
        await page.until(f"{charts}.replaceAll('\\n', ' ').includes('queue full 2')")
        rows = "[...document.querySelectorAll('#requests .pill')].map((one) => one.innerText)"
        assert await page.see(rows) == ["queue full", "queue full", "answered"]
        await page.see(
            "document.querySelector('#which').value = 'refused',"
            "document.querySelector('#which').dispatchEvent(new Event('change'))"
        )
        assert await page.see(rows) == ["queue full", "queue full"]
        # Why it was refused is under its row.
        await page.see("document.querySelector('button.open').click()")
        assert "requests are under way already" in await page.text()
        assert page.complaints == []


async def test_names_are_text_whatever_they_are(browser):
    fleet = Fleet(prefill=0, decode=1)
    card = msgspec.structs.replace(CARD, name=HOSTILE)
    worker = FakeWorker(HOSTILE, "prefill", card)
    fleet.decode[0].card = card
    fleet.workers[HOSTILE] = worker
    worker.fail["prefill"] = p.Failed("bad_request", HOSTILE)
    async with serving(fleet) as (url, _), asking(url) as ask:
        page = await browser.open(url)
        assert await ask(prompt=HOSTILE) == 400
        assert await ask(prompt=HOSTILE, max_tokens=2) == 200
        await page.until(pill("answered"))
        await page.see("document.querySelectorAll('button.open').forEach((one) => one.click())")
        shown = await page.see("document.body.textContent")
        # As the model, as a worker of two requests and of a row, and as what a failure says.
        assert shown.count(HOSTILE) >= 5
        assert await page.see("document.querySelectorAll('body img, body script').length") == 0
        assert "under way" in await page.see("document.title")
        assert page.complaints == []


async def test_the_policy_keeps_scripts_out_that_are_not_files_of_the_page(browser):
    async with serving(Fleet(1, 1)) as (url, _):
        page = await browser.open(url)
        await page.until(LIVE)
        assert page.complaints == []
        await page.see(
            "document.body.append(Object.assign(document.createElement('script'),"
            "{textContent: 'window.entered = true'}))"
        )
        assert await page.see("window.entered") is None
        assert await page.until("true")
        assert any("Content Security Policy" in each for each in page.complaints)


@pytest.mark.parametrize("width", [320, 360, 820, 1280])
async def test_it_fits_any_screen(browser, width):
    fleet = Fleet(prefill=0, decode=1)
    fleet.workers["w" * 60] = FakeWorker("w" * 60, "prefill")
    async with serving(fleet) as (url, conductor), asking(url) as ask:
        assert await ask(max_tokens=3) == 200
        conductor.requests_max = 0
        assert await ask() == 429
        page = await browser.open(url, width=width, height=800)
        await page.until(pill("answered"))
        await page.see("document.querySelectorAll('button.open').forEach((one) => one.click())")
        await page.see("document.querySelectorAll('summary').forEach((one) => one.click())")
        assert await page.see("document.documentElement.scrollWidth") <= width
        inside = await page.see(
            "[...document.querySelectorAll('#workers *, #requests *, #tiles *')].every((one) =>"
            " one.getBoundingClientRect().right <= innerWidth)"
        )
        assert inside


@pytest.mark.parametrize("dark", [False, True])
async def test_text_can_be_read_by_day_and_by_night(browser, dark):
    async with serving(Fleet(1, 1)) as (url, conductor), asking(url) as ask:
        assert await ask(max_tokens=3) == 200
        conductor.requests_max = 0
        assert await ask() == 429
        page = await browser.open(url, dark=dark)
        await page.until(pill("answered"))
        told = await page.see(CONTRASTS)
        assert (told["back"] < 0.1) == dark
        assert len(told["found"]) > 15
        assert {name: ratio for name, ratio in told["found"].items() if ratio < 4.5} == {}


async def test_it_can_be_used_by_keyboard(browser):
    async with serving(Fleet(1, 1)) as (url, _), asking(url) as ask:
        assert await ask(max_tokens=3) == 200
        page = await browser.open(url)
        await page.until(pill("answered"))
        reached = []
        for _ in range(40):
            await page.press("Tab")
            node = await page.see(
                "(({activeElement: one}) => ({name: one.tagName, id: one.id,"
                " text: one.getAttribute('aria-valuetext'),"
                " seen: getComputedStyle(one).outlineStyle != 'none'}))(document)"
            )
            if node["name"] == "BODY":
                break
            assert node["seen"], f"no focus is seen on {node}"
            reached.append(node)
            if node["name"] == "svg" and len(reached) < 4:
                told = "document.activeElement.getAttribute('aria-valuetext')"
                assert "median" in await page.see(told)
                await page.press("Home")
                assert "before the start" in await page.see(told)
                await page.press("Escape", "ArrowLeft")
                assert await page.see("document.activeElement.ariaValueNow") == "58"
                await page.press("Escape")
            if node["name"] == "SUMMARY" and len(reached) < 5:
                await page.press("Enter")
                await page.until("document.querySelector('figure details[open] td')")
            if node["name"] == "BUTTON":
                await page.press("Enter")
                await page.until("document.activeElement.getAttribute('aria-expanded') == 'true'")
                assert "attempts" in await page.text()
        names = [node["name"] for node in reached]
        assert names.count("svg") == names.count("SUMMARY") == 6
        assert {"A", "SELECT", "BUTTON"} <= set(names)
        # All that is drawn has words too.
        drawn = "[...document.querySelectorAll('svg, [role=img]')]"
        assert await page.see(f"{drawn}.every((one) => one.getAttribute('aria-label'))")


async def test_what_is_open_and_has_the_focus_stays_so_while_figures_change(browser):
    async with serving(Fleet(1, 1)) as (url, _), asking(url) as ask:
        assert await ask(max_tokens=3) == 200
        page = await browser.open(url)
        await page.until(pill("answered"))
        await page.see("document.querySelector('button.open').focus()")
        await page.press("Enter")
        chosen = await page.see("document.activeElement.title")
        assert await ask(max_tokens=3) == 200
        await page.until("document.querySelectorAll('.pill').length == 2")
        kept = await page.see(
            "[document.activeElement.title, document.activeElement.getAttribute('aria-expanded')]"
        )
        assert kept == [chosen, "true"]


async def test_a_front_that_is_gone_is_told_and_found_again(browser, free_port):
    fleet = Fleet(1, 1)
    async with serving(fleet, port=free_port) as (url, _), asking(url) as ask:
        assert await ask(max_tokens=3) == 200
        page = await browser.open(url)
        await page.until(pill("answered"))
    await page.until("document.body.dataset.state == 'lost'")
    told = await page.text()
    assert "disconnected" in told
    assert "has not answered" in told
    assert "answered" in told  # what was known is still there
    async with serving(fleet, port=free_port) as (url, _), asking(url) as ask:
        await page.until(LIVE)
        assert "has not answered" not in await page.text()
        await page.until("!document.querySelectorAll('.pill').length")
        assert await ask(max_tokens=3) == 200
        await page.until(pill("answered"))
    # Of a failed connection a browser complains itself; nobody else does.
    assert {each.split("net::")[0] for each in page.complaints} <= {"Failed to load resource: "}, (
        page.complaints
    )


async def test_roles_and_lost_workers_are_shown(browser):
    fleet = Fleet(prefill=1, decode=2)
    async with serving(fleet) as (url, conductor):
        page = await browser.open(url)
        await page.until(LIVE)
        rows = "document.querySelector('#workers').innerText"
        assert "prefill" in await page.see(rows)
        await conductor.change_role("d1", "prefill")
        await page.until(f"{rows}.includes('1, to prefill')")
        fleet.decode[0].die()
        await page.until("document.body.dataset.state == 'troubled'")
        assert "lost" in await page.see(rows)
        assert "not serving" in await page.text()


async def test_where_a_key_is_set_the_page_asks_for_it_and_tells_nobody_else(browser):
    async with serving(Fleet(1, 1), token="secret") as (url, _):
        page = await browser.open(url)
        await page.until("document.body.dataset.state == 'locked'")
        assert "API key" in await page.text()
        assert not await page.see("document.querySelector('main').checkVisibility()")
        for key, told in (("wrong", "does not know this key"), ("schlüssel", "no such characters")):
            await page.until("document.activeElement.id == 'key'")
            await page.type(key)
            await page.press("Enter")
            await page.until(f"document.body.innerText.includes({json.dumps(told)})")
        await page.type("secret")
        await page.press("Enter")
        await page.until(LIVE)
        await page.go(url)  # the tab knows it
        await page.until(LIVE)
        assert not [each for each in page.requests if "secret" in each]
        assert await page.see("localStorage.length + document.cookie.length") == 0
        other = await browser.open(url)
        await other.until("document.body.dataset.state == 'locked'")
        await page.see("document.querySelector('#forget').click()")
        await page.until("document.body.dataset.state == 'locked'")


async def test_its_files_need_no_key_and_are_fetched_again_only_when_they_changed():
    folder = Path(pages.__file__).with_name("page")
    assert set(pages.OWN) == {each.name for each in folder.iterdir()}
    async with serving(Fleet(1, 1), token="secret") as (url, _), aiohttp.ClientSession() as http:
        for path in paths_of(pages.OWN):
            async with http.get(url + path) as answer:
                assert answer.status == 200
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                known = {"If-None-Match": answer.headers["ETag"]}
            async with http.get(url + path, headers=known) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
        for path in ("/stats", "/metrics"):
            async with http.get(url + path) as answer:
                assert answer.status == 401
