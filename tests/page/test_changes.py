"""What the page of a master changes: by the credential of an admin, and nothing without."""

from types import SimpleNamespace

import pytest
import pytest_asyncio

from mooncake_store import Client, LocalCluster, credentials
from mooncake_store.compat.control import Control
from mooncake_store.config import MasterConfig, load
from tests.browser import Browser, installed
from transfer_engine.wire.rights import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSED = "document.querySelector('#change-refused').innerText"
DONE = "document.querySelector('#done').innerText"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with Browser(installed()) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    installed()
    folder = tmp_path_factory.mktemp("changes")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the pool, long enough")
    settings = {"secret_file": str(secret), "credentials": str(folder / "credentials")}
    lines = {role: credentials.make(settings["credentials"], role.name, role) for role in Role}
    master = load(MasterConfig, overrides=settings).value
    with (
        LocalCluster(
            in_process=True, workers=2, segment="16MB", secret=secret.read_bytes(), master=settings
        ) as cluster,
        Client(cluster.url, secret_file=str(secret)) as client,
        Control("127.0.0.1", 0, secret_file=str(secret), settings=master) as control,
    ):
        control.serve(cluster.address)
        client.put_many([f"group/{at}" for at in range(9)] + ["single"], [b"x"] * 10)
        yield SimpleNamespace(
            url=control.url, client=client, admin=lines[Role.ADMIN], writer=lines[Role.WRITER]
        )


async def confirm(page, credential):
    """Write a credential into the dialogue that is open, and agree."""
    assert await page.see("document.activeElement.id") == "credential"
    await page.see("document.activeElement.select()")
    await page.type(credential)
    await page.press("Enter")


async def test_a_change_is_refused_to_whoever_is_no_admin(browser, place):
    page = await browser.open(place.url + "/#keys/single")
    await page.until("document.querySelector('#object button')?.checkVisibility()")
    await page.see("document.querySelector('#object button').click()")
    told = await page.see("document.querySelector('#change').innerText")
    assert 'object "single"' in told
    assert "cannot be taken back" in told
    await page.press("Enter")  # with nothing at all it is not even asked
    for credential, why in (
        ("mooncake:somebody:" + "a" * 64, "none that this pool believes"),
        (place.writer, "admin"),
        ("schlüssel", "no such characters"),
    ):
        await confirm(page, credential)
        await page.until(f"{REFUSED}.includes({why!r})")
    assert place.client.exists("single")
    assert not any("Bearer" in each or "mooncake:" in each for each in page.requests)
    await page.press("Escape")
    await page.until("!document.querySelector('#change').open")
    await page.until("document.querySelector('#credential').value == ''")


async def test_an_admin_removes_and_drains_what_the_dialogue_names(browser, place):
    page = await browser.open(place.url + "/#keys/single")
    await page.until("document.querySelector('#object button')?.checkVisibility()")
    await page.see("document.querySelector('#object button').click()")
    await confirm(page, place.admin)
    await page.until(f"{DONE}.includes('single was removed')")
    assert not place.client.exists("single")
    # The credential is known for as long as the page is, and nowhere but in it.
    await page.see("location.hash = 'keys/group%2F'")
    await page.until("document.querySelector('#remove-prefix').checkVisibility()")
    await page.see("document.querySelector('#remove-prefix').click()")
    assert '"group/"' in await page.see("document.querySelector('#change').innerText")
    await page.press("Enter")
    await page.until(f"{DONE}.includes('9 objects were removed')")
    assert not place.client.list("group/")
    kept = "localStorage.length + sessionStorage.length + document.cookie.length"
    assert await page.see(kept) == 0
    await page.see("location.hash = 'segments'")
    await page.until("document.querySelector('#segments button')?.checkVisibility()")
    name = await page.see("document.querySelector('#segments td').innerText")
    await page.see("document.querySelector('#segments button').click()")
    assert f"Drain segment {name}" in await page.see("document.querySelector('#change').innerText")
    await page.press("Enter")
    await page.until(f"{DONE}.includes('is being drained')")
    await page.until("/drain/.test(document.querySelector('#segments tbody').innerText)")
    await page.go(place.url + "/?again#segments")
    await page.until("document.querySelector('#segments tr button')")
    assert await page.see("document.querySelector('#credential').value") == ""
