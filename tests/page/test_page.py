"""The page of a master in a real browser, over a pool with real content."""

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from mooncake_store import Client, LocalCluster
from mooncake_store.compat.control import Control
from tests.browser import CONTRASTS, Browser, installed

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIVE = "document.body?.dataset.state == 'live'"
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
VIEWS = {
    "overview": "Throughput",
    "segments": "worker-0",
    "workers": "alive",
    "keys": "beginning of keys",
    "events": "stored",
    "journal": "Standbys",
}
"""What each view says that no other does, of this pool."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with Browser(installed()) as running:
        yield running


@pytest.fixture(scope="module")
def place():
    installed()
    with (
        LocalCluster(workers=2, segment="32MB") as cluster,
        Client(cluster.url) as client,
        Control("127.0.0.1", 0) as control,
    ):
        control.serve(cluster.address)
        client.put_many([f"model/layer-{at % 3}/{at}" for at in range(90)], [b"x" * 1000] * 90)
        yield SimpleNamespace(url=control.url, client=client, cluster=cluster)


@contextlib.asynccontextmanager
async def control_port(cluster, port):
    """Another one for the pool, which has a loop of its own."""
    control = await asyncio.to_thread(Control, "127.0.0.1", port)
    control.serve(cluster.address)
    try:
        yield control
    finally:
        await asyncio.to_thread(control.close)


def shown(view):
    return f"document.querySelector('#view-{view}').innerText"


async def follow(page, view):
    """Click the link to a view."""
    await page.see(f"document.querySelector('nav a[data-view={view}]').click()")
    await page.until(f"document.querySelector('#view-{view}').checkVisibility()")


def tile(title):
    """What a tile shows, as an expression."""
    return (
        "[...document.querySelectorAll('#tiles > div')]"
        f".find((one) => one.firstChild.textContent == {title!r}).innerText"
    )


async def test_a_click_leads_to_every_view_and_each_follows_the_pool(browser, place):
    page = await browser.open(place.url)
    await page.until(LIVE)
    await page.see("window.kept = true")
    for view, told in VIEWS.items():
        await follow(page, view)
        await page.until(f"{shown(view)}.includes({told!r})")
        assert await page.see("document.querySelectorAll('main > :not([hidden])').length") == 1
    place.client.put("a/new/one", b"value")
    await follow(page, "events")
    await page.until(f"{shown('events')}.includes('a/new/one')")
    await follow(page, "overview")
    objects = place.client.store_stats()[0].objects
    await page.until(f"{tile('Objects')}.includes('{objects}')")
    place.client.put("another/new/one", b"value")
    await page.until(f"{tile('Objects')}.includes('{objects + 1}')")
    await page.until("document.querySelectorAll('figure circle').length")  # a span has ended
    assert await page.see("window.kept")  # all that without loading it again
    assert page.complaints == []
    # What the page needs comes from where it is.
    assert {urlsplit(each).netloc for each in page.requests} == {urlsplit(place.url).netloc}


async def test_figures_are_there_at_once(browser, place):
    page = await browser.open(place.url)
    await page.until(LIVE)
    took_ms = await page.see("performance.getEntriesByName('figures')[0].startTime")
    print(f"figures after {took_ms:.0f} ms")
    assert took_ms < 10 * 300  # it is meant to take 300 where nothing else runs


async def test_a_key_is_found_with_all_that_is_known_of_it(browser, place):
    place.client.put("searched/for/one", b"x" * 5000)
    place.client.pin("searched/for/one", hard=True)
    place.client.put("searched/for/other", b"y")
    page = await browser.open(place.url + "/#keys")
    await page.until(LIVE)
    await page.until(f"{shown('keys')}.includes('model/layer-')")
    await page.see("document.querySelector('#key').focus()")
    await page.type("searched/for/one")
    await page.press("Enter")
    known = "document.querySelector('#object').innerText"
    await page.until(f"{known}.includes('readable')")
    await page.until(f"{known}.includes('stored')")
    told = (await page.see(known)).replace("\xa0", " ")
    for each in ("4.9 KiB", "hard", "worker-", "replica 1, memory"):
        assert each in told
    assert "keys/searched%2Ffor%2Fone" in await page.see("location.href")
    # How keys begin; and the address alone leads back to it.
    await page.see("document.querySelector('#key').value = 'searched/'")
    await page.press("Enter")
    listed = "[...document.querySelectorAll('#found tbody a')].map((one) => one.textContent).sort()"
    await page.until(f"{listed}.length == 2")
    assert await page.see(listed) == ["searched/for/one", "searched/for/other"]
    assert not await page.see("document.querySelector('#object').checkVisibility()")
    await page.see("history.back()")
    await page.until(f"document.querySelector('#object').checkVisibility() && {known}.length")
    assert page.complaints == []


async def test_what_is_read_is_told_of_a_sample(browser, place):
    place.client.put("hot/one", b"x" * 100)
    page = await browser.open(place.url + "/#keys")
    await page.until(LIVE)
    hot = "document.querySelector('#hot-keys').innerText"
    read = threading.Event()

    def reading():
        while not read.wait(0.02):
            place.client.get("hot/one")
            place.client.release_many(["hot/one"])  # what is read under a lease asks nobody

    thread = threading.Thread(target=reading)
    thread.start()
    try:
        await page.until(f"{hot}.includes('hot/one')")
    finally:
        read.set()
        thread.join()
    assert "hot/" in await page.see("document.querySelector('#hot-prefixes').innerText")
    assert "A sample" in await page.text()


async def test_names_are_text_whatever_they_are(browser, place):
    place.client.put(HOSTILE, b"value")
    page = await browser.open(place.url)
    await page.until(LIVE)
    await follow(page, "events")
    await page.until(f"{shown('events')}.includes({HOSTILE!r})")
    await page.see(f"location.hash = 'keys/' + encodeURIComponent({json.dumps(HOSTILE)})")
    await page.until("document.querySelector('#object').innerText.includes('readable')")
    # As what was searched for, as an object, and in a list.
    assert (await page.see("document.body.textContent")).count(HOSTILE) >= 3
    assert await page.see("document.querySelectorAll('body img, body script').length") == 0
    assert await page.see("document.title") == "mooncake master"
    assert page.complaints == []
    place.client.remove(HOSTILE, force=True)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (320, True), (1280, True)])
async def test_it_fits_any_screen_and_can_be_read_by_day_and_by_night(browser, place, width, dark):
    long = "a-key-without-any-end/" + "k" * 200
    place.client.put(long, b"value")
    page = await browser.open(place.url, width=width, height=844, dark=dark)
    await page.until(LIVE)
    for view in VIEWS:
        await follow(page, view)
        if view == "keys":
            await page.see(f"location.hash = 'keys/' + encodeURIComponent({long!r})")
            await page.until("document.querySelector('#object').innerText.includes('readable')")
        await page.until(f"{shown(view)}.length > 40")
        wide = await page.see(
            "[...document.querySelectorAll('body *')].filter((one) => one.checkVisibility()"
            f" && one.getBoundingClientRect().right > {width}).map((one) => one.outerHTML)"
        )
        assert await page.see("document.documentElement.scrollWidth") <= width, (view, wide)
        told = await page.see(CONTRASTS)
        assert (told["back"] < 0.1) == dark
        assert len(told["found"]) > 8
        assert {name: ratio for name, ratio in told["found"].items() if ratio < 4.5} == {}, view
    assert page.complaints == []


async def test_the_keyboard_alone_will_do(browser, place):
    page = await browser.open(place.url)
    await page.until(LIVE)
    reached = []
    for _ in range(40):
        await page.press("Tab")
        node = await page.see(
            "(({activeElement: one}) => ({name: one.tagName, view: one.dataset.view,"
            " seen: getComputedStyle(one).outlineStyle != 'none'}))(document)"
        )
        if node["name"] == "BODY":
            break
        assert node["seen"], f"no focus is seen on {node}"
        reached.append(node)
        if node.get("view") == "segments":
            break
    assert [each["view"] for each in reached if each.get("view")] == ["overview", "segments"]
    await page.press("Enter")
    await page.until("document.querySelector('#segments button')?.checkVisibility()")
    for _ in range(10):
        await page.press("Tab")
        if await page.see("document.activeElement.tagName") == "BUTTON":
            break
    await page.press("Enter")
    assert await page.see("document.querySelector('#change').open")
    assert await page.see("document.activeElement.id") == "credential"
    await page.press("Escape")
    assert not await page.see("document.querySelector('#change').open")
    # Where one was is where one is again.
    assert "Drain" in await page.see("document.activeElement.textContent")
    drawn = "[...document.querySelectorAll('svg, [role=img]')]"
    assert await page.see(f"{drawn}.every((one) => one.getAttribute('aria-label'))")


async def test_a_master_that_is_gone_is_told_and_found_again(browser, place, free_port):
    async with control_port(place.cluster, free_port) as control:
        page = await browser.open(control.url)
        await page.until(LIVE)
        objects = await page.see(tile("Objects"))
    await page.until("document.body.dataset.state == 'lost'")
    assert "has not been heard" in await page.text()
    assert await page.see(tile("Objects")) == objects  # what was known is still there
    async with control_port(place.cluster, free_port):
        await page.until(LIVE)
        assert "has not been heard" not in await page.text()
    # Of a failed connection a browser complains itself; nobody else does.
    assert {each.split("net::")[0] for each in page.complaints} <= {"Failed to load resource: "}, (
        page.complaints
    )


async def test_what_is_wrong_comes_first(browser, place):
    page = await browser.open(place.url)
    await page.until(LIVE)
    assert not await page.see("document.querySelector('#problems').checkVisibility()")
    place.cluster.stop_worker(1)
    wrong = "document.querySelector('#problems').innerText"
    try:
        await page.until(f"{wrong}.includes('worker-1 is ')")
        assert await page.see("document.querySelector('#wrong').innerText") == "1"
        assert "to look at" in await page.see("document.title")
        first = "document.querySelector('#view-overview').children[0].id"
        assert await page.see(first) == "problems"
        await follow(page, "events")
        await page.until(f"{shown('events')}.includes('worker-1 suspect')")
    finally:
        place.cluster.resume_worker(1)
