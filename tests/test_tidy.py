"""House rules that no linter has: sizes, banned calls, where kernels live, dead modules, prose.

Every rule is a function from one file to complaints, so that a complaint names file and line and
one run shows them all. An exception to a rule is an entry in a table here, with its reason.
"""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.sources import PACKAGES, ROOT, files, library, module_name, nodes, text, tree

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
BLOB_BYTES_MAX = 1 << 20

PYTHON = files(".py")
LIBRARY = library()
KERNELS = [path for path in LIBRARY if path.parent.name == "kernels" and path.name != "__init__.py"]
MARKDOWN = files(".md")
SCRIPTS = files(".sh", under=("scripts",))
PAGES = files(".html", ".css", ".js", under=PACKAGES)

# Calls by their dotted name, and what to use instead.
BANNED_CALLS = {
    "print": "write through mooncake_store.cli, or log",
    "eval": "parse the text",
    "exec": "import a module",
    "time.sleep": "wait for an event, with a deadline (in tests also tests.waiting.until)",
    "torch.load": "read safetensors",
    "breakpoint": "remove it",
}
BANNED_IMPORTS = {
    "pickle": "it executes what it reads: use msgspec",
    "marshal": "it executes what it reads: use msgspec",
    "shelve": "it executes what it reads: use msgspec",
    "cloudpickle": "it executes what it reads: use msgspec",
}

# (path or folder, banned name) -> why this place may use it.
ALLOWED = {
    ("tests", "print"): "shown by pytest only when a test fails, and by the fuzz and soak programs",
    ("tests", "pickle"): "our own objects must survive it, e.g. errors in worker processes",
    ("tests/waiting.py", "time.sleep"): "the one place where tests poll, with a deadline",
    ("tests/waiting.py", "asyncio.sleep"): "the one place where tests poll, with a deadline",
    ("tests/soak", "asyncio.sleep"): "load comes and faults happen at random times",
    ("mooncake_store/program/locks.py", "time.sleep"): (
        "a process that ends announces to nobody that its lock is free; the wait has a deadline"
    ),
    ("transfer_engine/transports/tcp_server.py", "time.sleep"): (
        "its threads end inside system calls and announce nothing; the waits have deadlines"
    ),
    ("tests/interop", "torch.load"): "it must work on files of the store; tensors only",
    ("tests/test_docs.py", "exec"): "it runs the code blocks of the documents",
    ("tests/packaging/cells.py", "exec"): "it runs the cells of the notebook",
}

MARKER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")

# Traces of a place of work; they mean nothing to a reader of the repository.
PLACES = re.compile(r"(?:^|[\s'\"`(])/work/|\.\./shared\b|(?:^|[\s'\"`(])shared/\w+\.md")
PROSE = re.compile(
    r"\b((this|my|our|a coding|an agent) session|workplace|sandbox|co-authored-by)\b", re.IGNORECASE
)

# (package, kernels of another one) -> why they may be called there.
SHARED = {
    ("mooncake_store", "transfer_engine.kernels.xxh3"): "keys are hashed as blocks are",
    ("mooncake_store", "transfer_engine.kernels.siphash"): "memory is read as there",
    ("mooncake_store", "transfer_engine.kernels.rights"): "rights are what owners make of them",
}

CHANGE_KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def each(paths):
    """Make a test of a rule, which asserts that the rule finds nothing in any of `paths`."""

    def decorate(rule):
        def test():
            assert paths, "no file is held to this rule"
            complaints = [f"{path}:{line}: {what}" for path in paths for line, what in rule(path)]
            assert not complaints, "\n".join(complaints)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate


def dotted(node):
    """`a.b.c` for a chain of names, and an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def allowed(path, name):
    return any((str(place), name) in ALLOWED for place in (path, *path.parents))


def functions(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in nodes(path) if isinstance(node, kinds)]


def imports(node):
    """The modules an import statement may name, most specific last."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@each(PYTHON)
def test_files_functions_and_lines_are_short(path):
    lines = text(path).splitlines()
    complaints = [
        (number, f"{len(line)} columns")
        for number, line in enumerate(lines, 1)
        if len(line) > LINE_COLUMNS_MAX
    ]
    if len(lines) > FILE_LINES_MAX:
        complaints.append((1, f"{len(lines)} lines"))
    for function in functions(path):
        length = function.end_lineno - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            complaints.append((function.lineno, f"{function.name} has {length} lines"))
    return complaints


@each([*SCRIPTS, *PAGES, Path("Makefile")])
def test_scripts_and_pages_are_short(path):
    lines = text(path).splitlines()
    complaints = [(n, "long") for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]
    return complaints + [(1, f"{len(lines)} lines")] * (len(lines) > FILE_LINES_MAX)


@each(PYTHON)
def test_banned_calls_and_imports(path):
    complaints = []
    for node in nodes(path):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if name in BANNED_CALLS and not allowed(path, name):
            complaints.append((node.lineno, f"{name}(): {BANNED_CALLS[name]}"))
        for name in imports(node):
            top = name.partition(".")[0]
            if top in BANNED_IMPORTS and not allowed(path, top):
                complaints.append((node.lineno, f"import {top}: {BANNED_IMPORTS[top]}"))
            if name == "time.sleep":
                complaints.append((node.lineno, f"time.sleep: {BANNED_CALLS[name]}"))
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            complaints.append((node.lineno, "bare except: name what is expected"))
    return complaints


@each([path for path in PYTHON if path.parts[0] == "tests"])
def test_tests_do_not_wait_for_time_to_pass(path):
    return [
        (node.lineno, "asyncio.sleep: await an event, or tests.waiting.until_async")
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and dotted(node.func) == "asyncio.sleep"
        and not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
        and not allowed(path, "asyncio.sleep")
    ]


@each([*PYTHON, *MARKDOWN, *SCRIPTS, *PAGES])
def test_nothing_is_left_for_later(path):
    return [
        (number, f"{match[0]}: do it or open an issue")
        for number, line in enumerate(text(path).splitlines(), 1)
        if (match := MARKER.search(line))
    ]


def kernels_of_others(path):
    """(line, module of kernels of another package) of all that a file imports."""
    found = set()
    for node in nodes(path):
        for name in imports(node):
            match = re.match(r"(\w+)\.(?:\w+\.)*kernels\.[a-z]\w*", name)
            if match and match[1] in PACKAGES and match[1] != path.parts[0]:
                found.add((node.lineno, match[0]))
    return sorted(found)


@each(LIBRARY)
def test_kernels_are_called_by_their_package_only(path):
    return [
        (line, f"{name} takes addresses on trust: use what {name.partition('.')[0]} offers")
        for line, name in kernels_of_others(path)
        if (path.parts[0], name) not in SHARED
    ]


@each(LIBRARY)
def test_what_is_public_is_said_by_a_package_not_by_underscores(path):
    return [(1, "name it without the underscore")] * bool(re.match(r"_[a-z]", path.name))


@each(LIBRARY)
def test_numba_is_imported_by_kernels_only(path):
    if path in KERNELS or path == Path("kernel_cache/compiling.py"):
        return []
    return [
        (node.lineno, "numba belongs in a folder of kernels, imported when first needed")
        for node in nodes(path)
        if any(name.partition(".")[0] == "numba" for name in imports(node))
    ]


def options(path, function):
    """The constant options of a function's decorators, those of a shared `**OPTIONS` included."""
    shared = vars(importlib.import_module(module_name(path)))
    found = {}
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            value = keyword.value
            if keyword.arg is None:
                found |= shared[dotted(value)]
            elif isinstance(value, ast.Constant):
                found[keyword.arg] = value.value
    return found


@each(KERNELS)
def test_kernels_are_cached_release_the_lock_and_are_documented(path):
    complaints = []
    for function in filter(is_kernel, functions(path)):
        on = {name for name, value in options(path, function).items() if value is True}
        missing = sorted({"cache", "nogil"} - on)
        complaints += [(function.lineno, f"{function.name}: no {name}=True") for name in missing]
        if not ast.get_docstring(function):
            complaints.append((function.lineno, f"{function.name}: no docstring"))
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module == "numba":
            taken = {name.name for name in node.names}
            complaints += [(node.lineno, "take njit from kernel_cache")] * ("njit" in taken)
    return complaints


@each(KERNELS)
def test_kernels_do_not_call_kernels_of_other_packages(path):
    # numba's disk cache looks at one file only: an edit of the other would go unnoticed. Within a
    # package `forget_stale_caches` sees it; a package may also be used, and edited, alone.
    package = str(path).split("/")[0]
    return [
        (node.lineno, f"imports {name}")
        for node in nodes(path)
        for name in imports(node)
        if ".kernels." in f"{name}." and name.split(".")[0] != package
    ]


def is_kernel(function):
    calls = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(dotted(call).rpartition(".")[2] in {"njit", "jit"} for call in calls)


@each(KERNELS)
def test_warmup_reaches_every_kernel(path):
    top = {node.name: node for node in tree(path).body if isinstance(node, ast.FunctionDef)}
    if "warmup" not in top and not path.parent.with_name("warmup.py").exists():
        return [(1, "no warmup()")]
    cold = not_called(path)
    if cold:
        # The warm-up goes through other modules, so look at what it compiled or loaded.
        cold -= closure(uses_of(path), compiled_by_warmups()[module_name(path)])
    return [(top[name].lineno, f"warmup does not call {name}") for name in sorted(cold)]


def uses_of(path):
    """What each function of a module uses of the others."""
    top = {node.name: node for node in tree(path).body if isinstance(node, ast.FunctionDef)}
    uses = {name: {n.id for n in ast.walk(f) if isinstance(n, ast.Name)} for name, f in top.items()}
    for name, function in top.items():
        # A numba extension (`@overload(f)`) is reached through the function it stands in for.
        for decorator in function.decorator_list:
            for extended in ast.walk(decorator):
                if isinstance(extended, ast.Name) and extended.id in top:
                    uses[extended.id].add(name)
    return uses


def not_called(path):
    """The kernels of a module that its own warm-up does not reach."""
    uses = uses_of(path)
    kernels = {f.name for f in tree(path).body if isinstance(f, ast.FunctionDef) and is_kernel(f)}
    return kernels - closure(uses, uses.keys() & {"warmup"})


def closure(uses, names):
    """All that is used by `names`, directly or not."""
    reached, pending = set(), list(names)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending.extend(uses[name] & uses.keys())
    return reached


WARM = """
import importlib, os, sys
from mooncake_store.program.kernels import warmup_of

for name in sys.argv[1:]:
    importlib.import_module(name)
for name in sys.argv[1:]:
    if os.fork() == 0:
        warmup_of(name)()
        print(name, *(
            each for each, value in vars(sys.modules[name]).items()
            if getattr(value, "__module__", "") == name and getattr(value, "signatures", None)
        ), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@cache
def compiled_by_warmups():
    """The kernels that the warm-up of a module has ready in a process of its own, by module."""
    names = [module_name(path) for path in KERNELS if not_called(path)]
    done = subprocess.run(
        [sys.executable, "-c", WARM, *names], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return {name: ready for name, *ready in map(str.split, done.stdout.splitlines())}


def test_no_module_is_dead():
    modules = {module_name(path): path for path in LIBRARY}
    program = 'if __name__ == "__main__":'
    alive = {name for name, path in modules.items() if program in text(path)} | set(PACKAGES)
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    points = [project["scripts"], *project.get("entry-points", {}).values()]
    alive |= {target.partition(":")[0] for group in points for target in group.values()}
    for path in LIBRARY:
        own = module_name(path)
        for node in nodes(path):
            used = imports(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A lazily imported module is named in a string.
                used = [node.value]
            alive |= {name for name in used if name != own}
    for name in list(alive & modules.keys()):
        # To import a module is to import the packages it is in.
        alive |= {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}
    # Commands, benches and transports are found by their file name; test kits are for others.
    found_by_name = re.compile(
        r"(mooncake_store|serving)\.(cli|bench)\.[a-z]\w*$|transfer_engine\.transports\.\w+$"
        r"|.*\.testing(\..*)?$"
    )
    dead = [p for name, p in modules.items() if name not in alive and not found_by_name.match(name)]
    assert not dead, f"nothing imports {', '.join(map(str, dead))}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_readme_of_one_screen_and_is_typed(package):
    readme = text(Path(package, "README.md"))
    assert readme.startswith("# ")
    assert len(readme.splitlines()) <= 100
    assert (ROOT / package / "py.typed").exists()


@each([*PYTHON, *MARKDOWN, *SCRIPTS, Path("Makefile"), Path("pyproject.toml")])
def test_the_repository_does_not_speak_of_where_it_was_made(path):
    if path == Path("tests/test_tidy.py"):
        return []
    prose = path.suffix == ".md"
    complaints = []
    for number, line in enumerate(text(path).splitlines(), 1):
        if (match := PLACES.search(line)) or (prose and (match := PROSE.search(line))):
            complaints.append((number, f"speaks of {match[0]!r}"))
    return complaints


def test_the_changelog_keeps_its_format():
    lines = text(Path("CHANGELOG.md")).splitlines()
    assert lines[0] == "# Changelog"
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    release = re.compile(r"## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}")
    released = [release.fullmatch(line) for line in headings[1:]]
    assert all(released), headings
    versions = [tuple(map(int, match[1].split("."))) for match in released]
    assert versions == sorted(set(versions), reverse=True)
    kinds = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert kinds <= CHANGE_KINDS, kinds - CHANGE_KINDS


def test_no_large_file_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    large = [name for name in names if (ROOT / name).stat().st_size > BLOB_BYTES_MAX]
    assert not large


def test_every_exception_to_a_rule_is_still_needed():
    """An exception nobody uses would let the next mistake through."""
    used = set()
    for path in PYTHON:
        names = {dotted(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
        names |= {name.partition(".")[0] for node in nodes(path) for name in imports(node)}
        used |= {(str(place), name) for place in (path, *path.parents) for name in names}
    assert not {key for key in ALLOWED if key not in used}
    shared = {(path.parts[0], name) for path in LIBRARY for _, name in kernels_of_others(path)}
    assert shared >= set(SHARED)
