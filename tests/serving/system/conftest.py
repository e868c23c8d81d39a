"""`mooncake serve` as a user starts it, once for all tests that only talk to it."""

import json

import pytest

pytest.importorskip("torch")

START_S = 100


def started(start_program, tmp_path, *options, **environment):
    """(program, facts) of a server that takes requests."""
    port_file = tmp_path / "port"
    program = start_program(
        "-m", "mooncake_store", "serve", "--port", "0", "--port-file", port_file,
        "--segment", "256MB", *options, **environment,
    )  # fmt: skip
    program.wait_for_line("answers at", START_S)
    return program, json.loads(port_file.read_text())


@pytest.fixture(scope="module")
def server(start_programs_of_module, tmp_path_factory):
    """The facts of a running server."""
    return started(start_programs_of_module, tmp_path_factory.mktemp("serve"))[1]


@pytest.fixture(scope="module")
def start_programs_of_module():
    """`start_program`, for programs that live as long as the module's tests."""
    from tests.conftest import programs

    yield from programs()
