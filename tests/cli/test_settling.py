"""Programs that hold garbage collection back while they start take it up again when they are ready.

Else each connection that ever was stays, for as long as a standby, a member or a host follows.
"""

import gc

import pytest

from mooncake_store.cli.main import main

FACTS = {"address": "127.0.0.1:1", "pid": 1, "leads": False, "of": "another", "shards": []}
STANDBY = ["standby", "--of", "127.0.0.1:1", "--port", "0"]
MEMBER = ["member", "--etcd", "127.0.0.1:1", "--host", "127.0.0.1", "--port", "1"]
HOST = ["shard", "serve", "--of", "127.0.0.1:1", "--port", "0"]
CASES = [
    ("mooncake_store.master.running.follow_until_promoted", "127.0.0.1:1", STANDBY),
    ("mooncake_store.standby.member.serve_member", FACTS, MEMBER),
    ("mooncake_store.hosting.program.serve_host", FACTS, HOST),
]


@pytest.fixture(autouse=True)
def as_before():
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


@pytest.mark.parametrize(("program", "told", "words"), CASES, ids=["standby", "member", "host"])
def test_garbage_is_collected_while_a_program_follows(monkeypatch, tmp_path, program, told, words):
    seen = []

    async def serve(*given, **options):
        on_ready = next(each for each in given if callable(each) and not isinstance(each, type))
        seen.append(gc.isenabled())
        on_ready(told)
        seen.append(gc.isenabled())

    monkeypatch.setattr(program, serve)
    assert main([*words, "--state", str(tmp_path)]) == 0
    assert seen == [False, True]
