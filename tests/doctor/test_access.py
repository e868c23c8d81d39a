"""What the doctor says of what is open, and of who may do what."""

import json
import secrets
import time

import pytest

from mooncake_store import credentials, sealing_keys
from mooncake_store.cli.main import main
from mooncake_store.credentials import credential_of
from mooncake_store.doctor import Severity
from mooncake_store.doctor_access import SOON_S, ask_master, examine_access
from mooncake_store.local_cluster import LocalCluster
from transfer_engine.wire.keyring import Alone
from transfer_engine.wire.rights import Role

DAY_S = 86_400


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("CONFIG", "SECRET_FILE", "CREDENTIALS"):
        monkeypatch.delenv(f"MOONCAKE_{name}", raising=False)


@pytest.fixture
def secret_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text(secrets.token_hex(32) + "\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def directory(tmp_path):
    """A folder of credentials with a writer of one namespace."""
    where = tmp_path / "credentials"
    credentials.make(str(where), "alice", Role.WRITER, namespaces=["team-a"])
    return where


def found(name, *arguments, **options):
    """The findings of a name."""
    every = examine_access(*arguments, **options)
    assert all(item.advice for item in every if item.severity > Severity.NOTE), every
    return [item for item in every if item.name == name]


def one(name, *arguments, **options):
    (item,) = found(name, *arguments, **options)
    return item


def configured(tmp_path, text):
    file = tmp_path / "mooncake.toml"
    file.write_text(text)
    return file


def test_a_pool_of_one_user_has_nothing_to_complain_of():
    assert {item.severity for item in examine_access()} == {Severity.OK}
    assert "of this host" in one("master.host").found


def test_a_guarded_pool_of_a_tenant_has_nothing_to_complain_of(tmp_path, secret_file, directory):
    file = configured(
        tmp_path,
        f'secret_file = "{secret_file}"\ncredentials = "{directory}"\n[master]\nhost = "0.0.0.0"\n',
    )
    assert {item.severity for item in examine_access(file)} == {Severity.OK}
    assert one("credential of alice", file).found == (
        "writer of team-a, who may put, change and remove objects; without limits"
    )
    assert one("master.host", file).found == "0.0.0.0, for who proves a secret"


def test_a_port_that_others_reach_without_a_secret_is_a_problem(tmp_path):
    item = one("settings of a worker", configured(tmp_path, '[worker]\nhost = "0.0.0.0"\n'))
    assert item.severity is Severity.PROBLEM
    assert "can be reached from other machines" in item.found
    assert "secret" in item.advice


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ('[master]\nhost = "0.0.0.0"\ninsecure = true\n', "master.insecure", "reaches 0.0.0.0"),
        ("[worker]\ninsecure = true\n", "worker.insecure", "every user of this host"),
        ('[master]\nreached_as = ["any"]\n', "master.reached_as", "stands between"),
        ('[master]\nidentity = "xxh3"\n', "master.identity", "make two of them meet"),
    ],
)
def test_what_opens_more_than_is_usual_is_a_warning(tmp_path, text, name, said):
    file = configured(tmp_path, text)
    item = one(name, file)
    assert item.severity is Severity.WARNING
    assert said in item.found


@pytest.mark.parametrize(
    ("mode", "severity"),
    [(0o600, "OK"), (0o640, "WARNING"), (0o644, "PROBLEM"), (0o666, "PROBLEM")],
)
def test_a_secret_that_others_can_read_is_told_with_what_to_run(secret_file, mode, severity):
    secret_file.chmod(mode)
    item = one(f"secret file {secret_file}", secret_file=str(secret_file))
    assert item.severity is Severity[severity]
    assert (item.advice == f"run: chmod 600 {secret_file}") == (severity != "OK")


def test_a_secret_that_is_none_is_a_problem(secret_file, tmp_path):
    secret_file.write_text("short")
    for path in (secret_file, tmp_path / "missing"):
        assert one(f"secret file {path}", secret_file=str(path)).severity is Severity.PROBLEM


def test_a_principals_credential_is_fine_for_a_client_and_no_master_runs_with_it(
    tmp_path, directory
):
    file = tmp_path / "bob.secret"
    credentials.write_text(file, credentials.make(str(directory), "bob", Role.READER))
    name = f"secret file {file}"
    assert one(name, secret_file=str(file)).severity is Severity.OK
    guards = one(name, secret_file=str(file), credentials=str(directory))
    assert guards.severity is Severity.NOTE
    assert "of bob: a worker may run with it, no master can" in guards.found


@pytest.mark.parametrize(
    ("left_s", "severity", "said"),
    [
        (-1, "WARNING", "has run out"),
        (3 * 3600 + 60, "WARNING", "runs out in 3 hours"),
        (3 * DAY_S + 60, "WARNING", "runs out in 3 days"),
        (SOON_S + 60, "OK", "writer of team-b"),
    ],
)
def test_a_credential_is_told_before_it_runs_out(secret_file, directory, left_s, severity, said):
    now = time.time()
    make = {"namespaces": ["team-b"], "until": now + left_s, "limits": {"bytes": 1 << 30}}
    credentials.make(str(directory), "bob", Role.WRITER, **make)
    options = {"secret_file": str(secret_file), "credentials": str(directory), "now": now}
    item = one("credential of bob", **options)
    assert item.severity is Severity[severity]
    assert said in item.found


def test_a_secret_that_was_rotated_counts_by_its_newest(secret_file, directory):
    credentials.rotate(str(directory), "alice", keep_s=60)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    assert one("credential of alice", **options).severity is Severity.OK


@pytest.mark.parametrize(
    ("role", "namespaces", "severity", "said"),
    [
        (Role.ADMIN, [], "NOTE", "an admin"),
        (
            Role.WRITER,
            [],
            "WARNING",
            "a writer of all namespaces, those of others included: team-a",
        ),
        (Role.READER, [], "NOTE", "a reader of all namespaces"),
        (Role.WORKER, [], "", ""),
        (Role.READER, ["team-a"], "", ""),
    ],
)
def test_who_may_much_is_told(secret_file, directory, role, namespaces, severity, said):
    credentials.make(str(directory), "bob", role, namespaces=namespaces)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    may, *wide = found("credential of bob", **options)
    assert may.severity is Severity.OK
    assert f"{role.name.lower()} of " in may.found
    assert "who may " in may.found
    assert [item.severity.name for item in wide] == ([severity] if said else [])
    assert all(item.found.startswith(said) for item in wide)


def test_a_writer_of_all_is_a_note_where_there_are_no_tenants(secret_file, tmp_path):
    credentials.make(str(tmp_path / "alone"), "bob", Role.WRITER)
    options = {"secret_file": str(secret_file), "credentials": str(tmp_path / "alone")}
    _, wide = found("credential of bob", **options)
    assert wide.severity is Severity.NOTE


def test_limits_are_told_with_what_a_credential_may(secret_file, directory):
    limits = {"bytes": 10 << 30, "clients": 100}
    credentials.make(str(directory), "bob", Role.WRITER, namespaces=["team-b"], limits=limits)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    may = one("credential of bob", **options)
    assert may.found.endswith("; limited to bytes=10GiB, clients=100")


def test_several_tenants_without_limits_are_told_who_can_take_it_all(
    tmp_path, secret_file, directory
):
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    limits = {"bytes": 1 << 30}
    assert not found("limits of alice", **options), "there is nobody else"
    credentials.make(str(directory), "bob", Role.WRITER, namespaces=["team-b"], limits=limits)
    credentials.make(str(directory), "carol", Role.READER, namespaces=["team-b"])
    item = one("limits of alice", **options)
    assert item.severity is Severity.WARNING
    assert "team-a, team-b" in item.found
    assert "--limit bytes=" in item.advice
    assert "--quota team-a=" in item.advice
    assert not found("limits of bob", **options)
    assert not found("limits of carol", **options)
    file = configured(tmp_path, '[master]\nquotas = ["team-a=1GiB"]\n')
    assert not found("limits of alice", file, **options), "a quota holds it as well"


@pytest.mark.parametrize("role", [Role.ADMIN, Role.WRITER])
def test_a_credential_that_its_group_can_read_is_told_with_what_it_gives_away(
    secret_file, directory, role
):
    credentials.make(str(directory), "bob", role)
    file = directory / "bob.json"
    file.chmod(0o640)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    item = one("credential file bob.json", **options)
    assert item.severity is Severity.WARNING
    assert f"come in as the {role.name.lower()}" in item.found
    assert item.advice == f"run: chmod 600 {file}"
    file.chmod(0o600)
    assert not found("credential file bob.json", **options)


def test_ones_own_credential_is_looked_at_as_a_secret_is(tmp_path, directory):
    file = tmp_path / "bob.secret"
    credentials.write_text(file, credentials.make(str(directory), "bob", Role.READER))
    file.chmod(0o640)
    item = one(f"secret file {file}", secret_file=str(file))
    assert item.severity is Severity.WARNING
    assert item.advice == f"run: chmod 600 {file}"


def test_files_that_are_not_believed_are_named_with_why(secret_file, directory):
    (directory / "bob.json").write_text("{}")
    (directory / "bob.json").chmod(0o600)
    (directory / "notes.txt").write_text("hello")
    credentials.make(str(directory), "carol", Role.READER, namespaces=["team-a"])
    (directory / "carol.json").chmod(0o644)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    for file, said in (
        ("bob.json", "no credential"),
        ("notes.txt", "its name"),
        ("carol.json", "0644"),
    ):
        item = one(f"credential file {file}", **options)
        assert item.severity is Severity.PROBLEM
        assert said in item.found
    assert one("credential of alice", **options).severity is Severity.OK


def test_a_directory_that_others_can_add_to_is_a_problem(secret_file, directory):
    directory.chmod(0o777)
    options = {"secret_file": str(secret_file), "credentials": str(directory)}
    item = one(f"credentials {directory}", **options)
    assert item.severity is Severity.PROBLEM
    assert item.advice == f"run: chmod 700 {directory}"


def test_credentials_without_a_secret_are_a_problem(directory):
    item = one("settings of a master", credentials=str(directory))
    assert item.severity is Severity.PROBLEM
    assert "secret_file" in item.found


# Asking a master.


def asked(address, secret=None):
    return {item.name: item for item in ask_master(address, secret)}


def test_a_master_without_a_secret_is_fine_on_a_loopback_and_a_problem_elsewhere(monkeypatch):
    with LocalCluster(workers=0, in_process=True) as cluster:
        address, name = cluster.address, f"master {cluster.address}"
        assert asked(address)[name].severity is Severity.OK
        monkeypatch.setattr("mooncake_store.doctor_access.is_loopback", lambda host: False)
        item = asked(address)[name]
        assert item.severity is Severity.PROBLEM
        assert "whoever reaches it" in item.found
    item = asked(address)[name]
    assert item.severity is Severity.PROBLEM
    assert "listens" in item.found


def test_a_master_with_a_secret_refuses_others_and_tells_its_own_more(secret_file, directory):
    secret = secret_file.read_bytes().strip()
    alice = credentials.rotate(str(directory), "alice", keep_s=0)
    master = {"secret_file": str(secret_file), "credentials": str(directory), "identity": "xxh3"}
    with LocalCluster(workers=0, in_process=True, secret=secret, master=master) as cluster:
        name = f"master {cluster.address}"
        assert asked(cluster.address).keys() == {name}
        assert asked(cluster.address)[name].severity is Severity.OK
        told = asked(cluster.address, secret)
        assert told[name].severity is Severity.OK
        assert told[f"identity of {cluster.address}"].severity is Severity.WARNING
        tenant = Alone(credential_of(alice.encode()))
        assert asked(cluster.address, tenant).keys() == {name}
        wrong = asked(cluster.address, b"another secret of enough bytes")
        assert wrong[f"secret for {cluster.address}"].severity is Severity.PROBLEM


def test_the_command_tells_of_both(secret_file, directory, capsys):
    credentials.make(str(directory), "bob", Role.ADMIN)
    options = ["--secret-file", str(secret_file), "--credentials", str(directory)]
    with LocalCluster(workers=0, in_process=True) as cluster:
        main(["doctor", "--json", *options])
        told = {
            (item["name"], item["severity"])
            for item in json.loads(capsys.readouterr().out)["findings"]
        }
        assert ("credential of bob", "note") in told
        main(["doctor", "--json", "--master", str(cluster.address)])
        told = {item["name"] for item in json.loads(capsys.readouterr().out)["findings"]}
        assert f"master {cluster.address}" in told


def of_cold(tmp_path, keys=""):
    given = f'[worker]\nname = "w"\ncold_url = "s3://bucket/pool"\ncold_keys = "{keys}"\n'
    return one("worker.cold_keys", configured(tmp_path, given))


def test_a_store_elsewhere_is_said_to_be_sealed_or_open(tmp_path, directory):
    assert not found("worker.cold_keys", configured(tmp_path, ""))
    item = of_cold(tmp_path)
    assert item.severity is Severity.NOTE
    assert "whoever can read s3://bucket/pool" in item.found
    sealing_keys.make(str(directory), "team-a")
    item = of_cold(tmp_path, directory)
    assert (item.severity, item.found) == (
        Severity.OK, "1 keys; what has none of its own is not written there",
    )  # fmt: skip
    sealing_keys.make(str(directory), "*")
    assert "sealed by that of all others" in of_cold(tmp_path, directory).found
    (directory / "team-a.key").chmod(0o644)
    item = of_cold(tmp_path, directory)
    assert item.severity is Severity.PROBLEM
    assert item.advice.startswith("run: chmod 600")


def test_keys_in_a_directory_of_credentials_are_no_files_that_are_not_believed(
    secret_file, directory
):
    sealing_keys.make(str(directory), "team-a")
    every = examine_access(secret_file=str(secret_file), credentials=str(directory))
    assert not [item for item in every if item.severity is Severity.PROBLEM]
