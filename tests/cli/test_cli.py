"""The `mooncake` command: speed of starting, help, JSON, errors and exit codes."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
import typer

import mooncake_store
from mooncake_store.cli.main import main
from mooncake_store.cli.shared import app
from mooncake_store.cli.shared.client import MASTER_NAMES, store_url
from mooncake_store.cli.shared.tree import COMMANDS, root
from mooncake_store.endpoint import split_url
from mooncake_store.errors import (
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    StoreError,
    UnavailableError,
)
from mooncake_store.printable import TEXT, printable
from tests.processes import processor_s

# What commands import, and how they start.
pytestmark = pytest.mark.cold


def every_command(command=None, path=("mooncake",)):
    """All commands of the tree as (words, command), groups included."""
    command = command or root()
    yield path, command
    if hasattr(command, "list_commands"):
        context = typer.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            yield from every_command(command.get_command(context, name), (*path, name))


LEAVES = [(path, command) for path, command in every_command() if not hasattr(command, "commands")]


def run(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "mooncake_store", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "COLUMNS"} | (env or {}),
    )


@pytest.fixture
def failing(monkeypatch):
    """A way to run a command line whose command raises what the test chooses."""

    def fail(error, *arguments):
        def raise_it(*_args, **_kwargs):
            raise error

        monkeypatch.setattr("importlib.metadata.version", raise_it)
        return main(["version", *arguments])

    return fail


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["bench", "--help"]])
def test_help_and_version_import_nothing_heavy(arguments):
    program = (
        "import sys; from mooncake_store.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'numpy', 'numba', 'torch', 'rich', 'fsspec', 'asyncio'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_help_is_quick():
    """Compared with the packages it stands on, so that the machine does not matter."""
    # Time on the processor, and the best of several: not the load of the machine.
    help_s, base_s = zip(
        *(
            (
                processor_s("-m", "mooncake_store", "--help"),
                processor_s("-c", "import typer, msgspec"),
            )
            for _ in range(5)
        ),
        strict=True,
    )
    assert min(help_s) < 2.5 * min(base_s)


def test_without_arguments_the_help_is_shown(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(p) for p, _ in LEAVES])
def test_every_command_has_help_examples_and_json(path, command):
    assert command.help
    assert command.help.splitlines()[0].endswith(".")
    lines = command.epilog.splitlines()
    assert lines[:2] == ["\b", "Examples:"]
    assert all(line.strip().startswith(" ".join(path)) for line in lines[2:])
    assert any("--json" in parameter.opts for parameter in command.params)
    for parameter in command.params:
        assert parameter.help, f"{' '.join(path)}: {parameter.name} has no help"


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(p) for p, _ in LEAVES])
def test_every_example_is_a_command_line_that_parses(path, command):
    for line in command.epilog.splitlines()[2:]:
        words = re.split(r"\s{2,}", line.strip())[0].split()[len(path) :]
        command.make_context(path[-1], words)


def test_version_says_what_is_installed(capsys):
    assert main(["version", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", value["version"])
    assert value["dependencies"]["numba"]
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"mooncake-store {value['version']}\n")


def test_the_version_is_one_number_wherever_it_is_asked_for(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mooncake-store {mooncake_store.__version__}\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == mooncake_store.__version__


@pytest.mark.parametrize("path", [path for path, _ in every_command()], ids=" ".join)
def test_h_is_help_everywhere(capsys, path):
    assert main([*path[1:], "-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: {' '.join(path)} ")
    assert "-h, --help" in shown


# Commands that talk to no store, or not as its users do. What is not here takes a store by name.
NO_STORE = {
    "version", "config show", "config init", "master", "umount", "doctor", "topology",
    "secret reader", "secret make", "secret list", "secret rotate", "secret revoke", "secret key",
    "secret destroy", "secret limit",
    "standby", "promote", "standbys", "member", "shard serve",  # are of masters
    "warmup", "journal show", "journal verify", "journal replay", "state export", "state import",
    "mount",  # takes the store where mount(8) has the device
    "completion",
    "chat",  # talks to what speaks OpenAI's API
    "simulate run", "simulate ablation", "simulate paper", "simulate scenario", "simulate fit",
    "advise",
    "trace describe", "trace generate", "trace speed", "trace spread", "trace split",
}  # fmt: skip
STORE = {
    name: command
    for name, command in ((" ".join(path[1:]), command) for path, command in LEAVES)
    if name not in NO_STORE and not name.startswith("bench ")
}


def test_what_talks_to_no_store_is_a_command():
    assert {" ".join(path[1:]) for path, _ in LEAVES} >= NO_STORE
    assert len(STORE) >= 12


# What talks to a store takes its name alike: as a URL or as the address of its master.
@pytest.mark.parametrize("name", STORE)
def test_every_command_takes_a_store_by_url_and_by_address(name):
    command = STORE[name]
    needed = [each for each in command.params if each.required]
    words = ["x" for each in needed if each.param_type_name == "argument"]
    words += [f"{each.opts[0]}=x" for each in needed if each.param_type_name == "option"]
    for option in ("--url", "--master"):
        for store in ("mooncake://10.0.0.5:50051/team", "10.0.0.5:50051"):
            context = command.make_context(name, [*words, option, store])
            assert store in context.params.values()


def test_whoever_takes_a_master_by_an_option_takes_it_by_either_name():
    names = set(MASTER_NAMES)
    halves = {
        " ".join(path): each.opts
        for path, command in LEAVES
        for each in command.params
        if names & set(each.opts) or "--of" in each.opts
    }
    del halves["mooncake chat"]  # its URL is that of a server of OpenAI's API
    assert {path: opts for path, opts in halves.items() if not names <= set(opts)} == {}
    assert {"mooncake standby", "mooncake standbys", "mooncake worker", "mooncake doctor"} <= set(
        halves
    )


@pytest.mark.parametrize(
    ("named", "url"),
    [
        ("10.0.0.5:50051", "mooncake://10.0.0.5:50051/default"),
        ("mooncake://10.0.0.5/team", "mooncake://10.0.0.5:50051/team"),
        ("[::1]:1", "mooncake://[::1]:1/default"),
        ("10.0.0.5:1,10.0.0.6:2", "mooncake://10.0.0.5:1,10.0.0.6:2/default"),
        ("host", "mooncake://host:50051/default"),
    ],
)
def test_a_store_is_named_by_its_url_or_its_master(named, url):
    assert split_url(store_url(named)) == split_url(url)


def test_what_others_wrote_is_shown_with_escapes():
    names = "a\tb\nc\x1b[31m\x7f\x85\x9b\u202e\u2066\u200f\ud800 é 日本"
    shown = r"a\tb\nc\x1b[31m\x7f\x85\x9b\u202e\u2066\u200f\ud800 é 日本"
    assert printable(names) == shown
    assert printable("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert printable("\u2028\u2029\u061c\u200b\xad\U000e0041") == (
        r"\u2028\u2029\u061c\u200b\xad\U000e0041"
    )
    assert printable("a\u200db\u3000c\u2028", keep=TEXT) == "a\u200db\u3000c\\u2028"


def test_an_error_and_a_note_do_not_steer_the_terminal(failing, capsys):
    app.note("peer \x1b]0;x")
    assert failing(StoreError("the peer says \x9b31m\nerror: other")) == 1
    assert capsys.readouterr().err == (
        "note: peer \\x1b]0;x\nerror: the peer says \\x9b31m\\nerror: other\n"
    )
    failing(StoreError("\x9b31m"), "--debug")
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "\x9b" not in told


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["benhc"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "error: there is no command 'benhc' (did you mean 'bench'?); see `mooncake --help`\n"
    )


def test_a_misspelt_option_is_answered_with_the_nearest(capsys):
    assert main(["version", "--jsno"]) == 2
    shown = capsys.readouterr().err
    assert "--json" in shown
    assert "`mooncake version --help`" in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreError("broken"), 1),
        (RuntimeError("bug"), 1),
        (FileNotFoundError(2, "No such file or directory", "trace.jsonl"), 1),
        (InvalidArgumentError("a size below zero"), 2),
        (ConfigError("no such setting"), 3),
        (UnavailableError("no master"), 4),
        (PeerLostError("gone"), 4),
        (NotFoundError("no object", key="a"), 5),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_an_error_is_one_sentence_and_a_documented_code(failing, capsys, error, code):
    assert failing(error) == code
    assert code in list(app.ExitCode)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    if code == 130:
        assert shown.err == ""
    else:
        assert re.fullmatch(r"error: [^\n]+\n", shown.err)
        assert str(error.args[0]) in shown.err or "No such file" in shown.err


def test_an_error_names_the_next_step_once(failing, capsys):
    failing(UnavailableError("no master", peer="127.0.0.1:1"))
    assert capsys.readouterr().err == (
        "error: no master (peer 127.0.0.1:1); check the address and that the service runs\n"
    )


def test_an_unexpected_error_says_how_to_report_it(failing, capsys):
    failing(RuntimeError("bug"))
    assert "--debug" in capsys.readouterr().err


@pytest.mark.parametrize("where", [["--debug", "version"], ["version", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(failing, capsys, where):
    failing(RuntimeError("bug"), "--debug")
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.splitlines()[-1].startswith("error: internal error: RuntimeError: bug;")


def test_with_json_an_error_is_one_object_on_standard_error(failing, capsys):
    assert failing(NotFoundError("no object", key="a"), "--json") == 5
    shown = capsys.readouterr()
    assert shown.out == ""
    error = json.loads(shown.err)["error"]
    assert error["type"] == "NotFoundError"
    assert error["message"] == "no object (key 'a')"
    assert error["next_step"]
    assert (error["exit_code"], error["code"]) == (5, NotFoundError.code)
    assert "traceback" not in error


def test_with_json_and_debug_the_traceback_is_inside_the_object(failing, capsys):
    failing(RuntimeError("bug"), "--json", "--debug")
    assert "Traceback" in json.loads(capsys.readouterr().err)["error"]["traceback"]


def test_a_usage_error_with_json_is_an_object_too(capsys):
    assert main(["version", "--json", "--nope"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["exit_code"] == 2


def test_a_group_without_command_shows_its_help_as_a_usage_error(capsys):
    assert main(["bench"]) == 2
    shown = capsys.readouterr()
    assert "Usage: mooncake bench" in shown.out + shown.err
    assert "error:" not in shown.err


def test_ctrl_c_ends_a_running_command_without_a_traceback(start_program):
    program = start_program(
        "-c",
        "import sys, signal; from mooncake_store.cli.shared import app;"
        "wait = lambda: (print('waiting', flush=True), signal.pause());"
        "sys.exit(app.guarded(wait, as_json=False, debug=False))",
    )
    program.wait_for_line("waiting")
    program.signal(2)
    assert program.wait() == 130
    assert program.output == "waiting\n"


def test_ctrl_c_while_modules_load_is_quiet_too(start_program):
    # Interrupted from inside an import, at a moment that a signal would rarely hit.
    program = start_program(
        "-c",
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "from mooncake_store.cli.main import main\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.exit(main(['version']))",
    )
    assert program.wait() == 130
    assert program.output == ""


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mooncake_store --help | true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""


def test_piped_output_has_no_colour_and_no_progress():
    done = run("version")
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_appears_on_a_terminal_only(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    monkeypatch.setenv("TERM", "xterm")
    with app.progress("compiling") as say:
        say("compiling more")
    assert ("compiling" in sys.stderr.getvalue()) == terminal
    assert terminal or sys.stderr.getvalue() == ""


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_honoured(monkeypatch, no_color):
    monkeypatch.setattr(sys, "stderr", Stream(terminal=True))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    with app.progress("compiling"):
        pass
    coloured = re.search(r"\x1b\[(3\d|38;)", sys.stderr.getvalue())
    assert bool(coloured) != no_color


def test_the_help_lists_every_exit_code(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^ +{int(code)}  ", shown, re.MULTILINE) for code in app.ExitCode)


def test_keys_that_look_like_markup_are_shown_as_they_are(capsys):
    drawn = app.table({"key": "left"}, [("[bold]a[/bold] :smile:",)])
    app.emit({}, as_json=False, human=lambda: drawn)
    assert "[bold]a[/bold] :smile:" in capsys.readouterr().out


def test_completion_knows_commands_and_options():
    def complete(words):
        env = {
            "_MOONCAKE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        program = "import sys; from mooncake_store.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.split()

    assert complete("mooncake be") == ["bench"]
    assert complete("mooncake version --j") == ["--json"]
