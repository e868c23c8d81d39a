"""What applications say of themselves, beside what they have."""

import asyncio
import json
import re
import urllib.error
import urllib.request

import aiohttp
import pytest

from mooncake_store.compat.control import Control
from mooncake_store.page.api import OPERATIONS as PAGE
from mooncake_store.program.shell import Shell
from tests.serving.front.conftest import listening
from tests.serving.front.test_shell import KINDS

VARIABLE = re.compile(r"\{(\w+)(:[^{}]*)?\}")


def said(description):
    """(method, path) of every operation."""
    return {
        (method.upper(), path)
        for path, operations in description["paths"].items()
        for method in operations
    }


def ask(application, *requests, token=""):
    """(status, headers, JSON) of each (method, path) to an application."""

    async def run():
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        found = []
        async with listening(application) as url, aiohttp.ClientSession() as session:
            for method, path in requests:
                async with session.request(method, url + path, headers=headers) as answer:
                    found.append((answer.status, answer.headers, await answer.json()))
        return found

    return asyncio.run(run())


def status(url, method):
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("name", KINDS)
def test_what_an_application_has_it_says_and_what_it_says_it_has(name, monkeypatch):
    application = KINDS[name].make(Shell(), monkeypatch)
    routes = {
        (route.method, route.resource.canonical)
        for route in application.router.routes()
        if route.method != "HEAD"  # which comes with GET
    }
    ((status, _, description),) = ask(application, ("GET", "/openapi.json"))
    assert status == 200
    assert said(description) == routes
    assert ("GET", "/openapi.json") in routes


@pytest.mark.parametrize("name", KINDS)
def test_a_description_is_for_who_has_the_token_and_says_what_wants_it(name, monkeypatch):
    def make():
        return KINDS[name].make(Shell(token="right"), monkeypatch)

    ((status, _, error),) = ask(make(), ("GET", "/openapi.json"))
    assert (status, "error" in error) == (401, True)
    ((_, _, description),) = ask(make(), ("GET", "/openapi.json"), token="right")
    secured = [
        (method.upper(), path)
        for path, operations in description["paths"].items()
        for method, each in operations.items()
        if "security" in each
    ]
    requests = [(method, VARIABLE.sub("a", path)) for method, path in secured]
    assert [status for status, *_ in ask(make(), *requests)] == [401] * len(secured)
    public = said(description) - set(secured)
    open_to_all = {("GET", "/health"), ("GET", "/"), ("GET", "/page/page.css")}
    assert public & open_to_all == open_to_all & said(description)


def test_without_a_token_only_what_is_for_administrators_wants_one(monkeypatch):
    application = KINDS["engines"].make(Shell(), monkeypatch)
    ((_, _, description),) = ask(application, ("GET", "/openapi.json"))
    assert {
        path
        for path, operations in description["paths"].items()
        if any("security" in each for each in operations.values())
    } == {"/register", "/unregister"}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_there_is_refused_in_the_form_of_all_refusals(name, monkeypatch):
    kind = KINDS[name]
    application = kind.make(Shell(), monkeypatch)
    missing, other = ask(application, ("GET", "/nothing"), ("PATCH", kind.sent))
    assert (missing[0], "error" in missing[2]) == (404, True)
    assert (other[0], other[1]["Allow"], "error" in other[2]) == (405, kind.method, True)


def test_the_control_port_says_what_it_has():
    with Control("127.0.0.1", 0) as control:
        base = f"http://{control.address}"
        with urllib.request.urlopen(f"{base}/openapi.json", timeout=20) as answer:
            operations = said(json.load(answer))
        has = {("GET", path) for path in (*control._fixed, *control._reads)}
        has |= {(each.method, each.path) for each in PAGE}
        assert operations == has | {("POST", path) for path in control._changes}
        statuses = {status(base + path, method) for method, path in operations}
        assert statuses == {200, 503}  # no master yet
