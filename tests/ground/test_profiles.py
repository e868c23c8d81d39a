"""Profiles: tables of a file that say which store a client talks to."""

import pytest

from mooncake_store import Client, LocalCluster
from mooncake_store.config.settings import ClientConfig, MasterConfig, load, load_client
from mooncake_store.errors import ConfigError

TEXT = """
[client]
deadline = "9s"
replicas = 2

[profile.test]
url = "mooncake://test:1/a"
deadline = "5s"

[profile.prod]
url = "mooncake://prod:2/b"
"""
OWN = {"MOONCAKE_CLIENT_URL": "mooncake://own:3/c"}


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "m.toml"
    found.write_text(TEXT)
    return str(found)


def test_a_profile_replaces_the_settings_of_the_client_and_no_others(path):
    loaded = load(ClientConfig, file=path, profile="test", environ={})
    value = loaded.value
    assert (value.url, value.deadline_s, value.replicas) == ("mooncake://test:1/a", 5.0, 2)
    assert loaded.origins["url"] == f"file {path} [profile.test]"
    assert loaded.origins["replicas"] == f"file {path}"
    assert load(ClientConfig, file=path, environ={}).value.deadline_s == 9.0


def test_a_profile_that_is_asked_for_is_never_overruled_by_a_variable(path):
    environ = OWN | {"MOONCAKE_PROFILE": "prod"}
    loaded = load(ClientConfig, file=path, profile="test", environ=environ)
    assert loaded.value.url == "mooncake://test:1/a"
    given = {"url": "mooncake://given:4/d"}
    loaded = load(ClientConfig, file=path, profile="test", environ=environ, overrides=given)
    assert loaded.value.url == "mooncake://given:4/d"


def test_a_profile_of_the_environment_yields_to_a_variable_of_its_own(path):
    environ = {"MOONCAKE_CONFIG": path, "MOONCAKE_PROFILE": "prod"}
    assert load(ClientConfig, environ=environ).value.url == "mooncake://prod:2/b"
    assert load(ClientConfig, environ=environ | OWN).value.url == "mooncake://own:3/c"
    assert load(MasterConfig, environ=environ).value == MasterConfig()  # it concerns clients


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"profile": "tset"}, "there is no [profile.tset] in PATH; did you mean 'test'?"),
        (
            {"environ": {"MOONCAKE_PROFILE": "tset"}},
            "there is no [profile.tset] in PATH (named by MOONCAKE_PROFILE); did you mean 'test'?",
        ),
        (
            {"profile": "test", "file": None},
            "there is no file to read the profile 'test' from; "
            "name one by --config FILE or MOONCAKE_CONFIG",
        ),
    ],
)
def test_a_profile_that_is_not_there_is_refused(path, sources, said):
    with pytest.raises(ConfigError) as refused:
        load(ClientConfig, **({"file": path, "environ": {}} | sources))
    assert str(refused.value).replace(path, "PATH") == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[profile.a]\nulr = '1'",
            "unknown setting 'ulr' in [profile.a] of PATH; did you mean 'url'?",
        ),
        ("[profile.a]\nport = 1", "unknown setting 'port' in [profile.a] of PATH; "),
        ("[profile]\nurl = '1'", "'url' in [profile] of PATH is in no profile; begin one by the "),
        ("profile = 1", "'profile' in PATH must be a table, begun by the line [profile.NAME]"),
        ("[profiel.a]", "unknown table 'profiel' in PATH; did you mean 'profile'?"),
    ],
)
def test_a_wrong_profile_is_refused_by_every_program(path, text, said):
    with open(path, "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as refused:
        load(MasterConfig, file=path, environ={})
    assert said in str(refused.value).replace(path, "PATH")


def test_a_wrong_value_in_a_profile_is_refused_where_it_stands(path):
    with open(path, "a") as file:
        file.write("replicas = 0\n")
    with pytest.raises(ConfigError, match=r"replicas in \[profile\.prod\] of .* must be a whole"):
        load_client(None, {"config_file": path, "profile": "prod"})


def test_a_client_reaches_the_store_of_its_profile(path):
    with LocalCluster(segment="16MiB", in_process=True) as cluster:
        with open(path, "a") as file:
            file.write(f'[profile.here]\nurl = "{cluster.url}"\n')
        with Client(config_file=path, profile="here") as client:
            assert client.config.url == cluster.url
            client.put("a", b"1")
            assert client.get("a") == b"1"
