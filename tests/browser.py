"""A real browser for tests: Debian's chromium without a window, driven by its own protocol.

    async with Browser(chromium) as browser:
        page = await browser.open(url, width=360, dark=True)
        await page.until("document.title != ''")
        assert not page.complaints

Messages go over two pipes, each ended by a zero byte (`--remote-debugging-pipe`): nothing listens
on a port and no library is needed. Each page has storage of its own. What a page writes to its
console, throws, or is refused by its policy is kept in `complaints`.
"""

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile

import pytest

from tests.waiting import PATIENCE_S

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
MESSAGE_BYTES_MAX = 64 << 20
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "Home": 36, "ArrowLeft": 37}

CONTRASTS = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = channels(colour).map((one) => one / 255)
      .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return channels(colour)[3] === 0 && node.parentElement ? behind(node.parentElement) : colour;
  };
  const found = {};
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(node instanceof SVGElement ? style.fill : style.color),
      light(behind(node))];
    found[node.tagName + '.' + (node.getAttribute('class') || '')] =
      (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return {found, back: light(getComputedStyle(document.body).backgroundColor)};
})()"""
"""How much text differs from what is behind it, by kind of element, and how light the page is."""


def installed():
    """The browser, or a skip."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return found


def _high(descriptor):
    """The same, away from the numbers that the browser will use."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)
    os.close(descriptor)
    return high


class Browser:
    """One process; belongs to one event loop."""

    def __init__(self, path):
        self._path = path
        self._numbers = itertools.count(1)
        self._answers = {}
        self._pages = {}

    async def __aenter__(self):
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, ours_out = map(_high, os.pipe())
        ours_in, theirs_out = map(_high, os.pipe())
        # The protocol is read from descriptor 3 and written to 4.
        self._process = await asyncio.create_subprocess_exec(
            "bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash",
            self._path, *ARGUMENTS, f"--user-data-dir={self._profile.name}", "about:blank",
            pass_fds=(theirs_in, theirs_out), start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MESSAGE_BYTES_MAX)
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", 0)
        )
        self._out = os.fdopen(ours_out, "wb", 0)
        self._reading = loop.create_task(self._read(reader))
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(AssertionError, OSError, ConnectionError):
            await self.call("Browser.close")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._reading.cancel()
            self._transport.close()
            self._out.close()
            self._profile.cleanup()

    async def _read(self, reader):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    answer = self._answers.pop(message["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                elif message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].happened(message)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the browser is gone"))

    async def call(self, method, session=None, **params):
        """The result of a command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await asyncio.to_thread(self._out.write, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            told = await answer
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    async def open(self, url, *, width=1280, height=900, dark=False):
        """A page with its own storage, and what it shows at first."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        page = Page(self, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        await page.go(url)
        return page


class Page:
    """One tab."""

    def __init__(self, browser, session):
        self._browser = browser
        self._session = session
        self._loaded = asyncio.Event()
        self.complaints = []
        """Errors and warnings of the console, exceptions, what the policy refused."""
        self.requests = []
        """URLs that it asked for."""

    async def call(self, method, **params):
        """A command to this tab."""
        return await self._browser.call(method, self._session, **params)

    async def go(self, url):
        """Load another document, whole."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await self._loaded.wait()

    def happened(self, message):
        """Keep what a test wants to know of."""
        params = message["params"]
        match message["method"]:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Log.entryAdded":
                entry = params["entry"]
                if entry["level"] in ("error", "warning"):
                    self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                said = [str(each.get("value", each)) for each in params["args"]]
                self.complaints.append(" ".join(said))
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", "")
                self.complaints.append(f"{details['text']} {thrown}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    async def resize(self, width, height):
        """Have a screen of another size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def see(self, expression):
        """The value of an expression of JavaScript."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression):
        """The first true value of an expression, looked at again and again in the page."""
        wait = f"""new Promise((tell) => {{
            const until = performance.now() + {1000 * PATIENCE_S / 2};
            const look = () => {{
                const value = ({expression});
                if (value || performance.now() > until) tell(value instanceof Node || value);
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        value = await self.see(wait)
        assert value, f"{expression} is {value} after {PATIENCE_S / 2} s: {await self.text()}"
        return value

    async def text(self):
        """All that can be read."""
        return await self.see("document.body.innerText")

    async def press(self, *keys):
        """Press keys, by their names."""
        for key in keys:
            text = {"Enter": "\r", " ": " "}.get(key)
            more = {"text": text} if text else {}
            for kind in ("keyDown", "keyUp"):
                await self.call(
                    "Input.dispatchKeyEvent",
                    type=kind, key=key, code="Space" if key == " " else key,
                    windowsVirtualKeyCode=KEYS[key], **(more if kind == "keyDown" else {}),
                )  # fmt: skip

    async def type(self, text):
        """Write where the focus is."""
        await self.call("Input.insertText", text=text)

    async def picture(self, *, whole=False):
        """What it looks like, as PNG."""
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(told["data"])
