"""How modules lean on each other: in no circle, and on all that is public."""

import ast
import functools
import importlib
import inspect
import re

from tests.sources import PACKAGES, files, library, module_name, nodes, text, tree

MODULES = {module_name(path): path for path in library()}

# Held to "nothing public without a use": all that lies in these packages.
STRICT = ("mooncake_store.client", "mooncake_store.core", "transfer_engine")
# Where what is public for users is named.
DOCUMENTS = [
    *files(".md", under=("docs/guide", "docs/reference")),
    *(path for path in files(".md") if path.name == "README.md"),
]
# By which the others come to the client: its faces, what they answer, and the door for builders.
CLIENT = "mooncake_store.client"
CLIENT_DOORS = {
    CLIENT,
    *(f"{CLIENT}.{name}" for name in ("aio", "blocking", "extension", "results")),
}


def handed_on(path):
    """The import statements of a package by which it hands on names (`kernel_cache.lazy`)."""
    blocks = [node for node in tree(path).body if isinstance(node, ast.If)]
    lazy = [block for block in blocks if "names_of" in ast.unparse(block.orelse)]
    return [node for block in lazy for node in block.body if isinstance(node, ast.ImportFrom)]


@functools.cache
def homes():
    """By package and name that it hands on: the module that it has the name from."""
    return {
        (package, alias.name): node.module
        for package, path in MODULES.items()
        if path.name == "__init__.py"
        for node in handed_on(path)
        for alias in node.names
    }


def home(module, name):
    """The module that `from module import name` needs: not the package that only hands it on."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    further = homes().get((module, name))
    return home(further, name) if further else module


def needs(module):
    """(module, line) of all that a module imports, in functions and for types as well."""
    path = MODULES[module]
    skipped = handed_on(path)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            assert not node.level, f"{path}:{node.lineno}: name the module in full"
            found = [home(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in found if name in MODULES)


def reached(module, edges):
    """All modules that one needs, directly or not."""
    found, pending = set(), [module]
    while pending:
        new = {name for name, _ in edges[pending.pop()]} - found
        found |= new
        pending += new
    return found


def test_no_modules_need_each_other():
    edges = {module: list(needs(module)) for module in MODULES}
    below = {module: reached(module, edges) for module in MODULES}
    circles = {
        tuple(sorted(other for other in below[module] if module in below[other]))
        for module in MODULES
        if module in below[module]
    }
    complaints = {
        f"{MODULES[module]}:{line}: needs {name}, which needs it"
        for circle in circles
        for module in circle
        for name, line in edges[module]
        if name in circle
    }
    assert not complaints, "\n".join(sorted(complaints))


def test_what_builds_on_the_client_comes_by_its_doors():
    complaints = [
        f"{path}:{node.lineno}: {node.module} is the client's own: use its extension.py"
        for module, path in MODULES.items()
        if not module.startswith(CLIENT)
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        and f"{node.module}.".startswith(f"{CLIENT}.")
        and node.module not in CLIENT_DOORS
    ]
    assert not complaints, "\n".join(complaints)


def strict(module):
    return module.startswith(STRICT) and not module.endswith("testing")


def public_names(module):
    """(name, line, owner) of the public functions, classes and methods; an owner has a method.

    Functions `interpreted_...` stand in for intrinsics where a test runs kernels as Python.
    """
    for node in tree(MODULES[module]).body:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        if not isinstance(node, (*kinds, ast.ClassDef)):
            continue
        if not node.name.startswith(("_", "interpreted_")):
            yield node.name, node.lineno, None
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, kinds) and not part.name.startswith("_"):
                yield part.name, part.lineno, node.name


def uses(path):
    """Every name that a file speaks of, but for what it defines and its `__all__`."""
    listed = set()
    for node in nodes(path):
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            listed |= {id(each) for each in ast.walk(node)}
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
    for node in nodes(path):
        # Operations are also named by strings.
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in listed
        ):
            yield node.value


def overrides(module, owner, name):
    """Whether a method is one of a class that is not ours, which calls it."""
    kind = getattr(importlib.import_module(module), owner)
    bases = [base for base in inspect.getmro(kind) if base.__module__.split(".")[0] not in PACKAGES]
    return any(name in vars(base) for base in bases)


def test_nothing_public_is_without_a_use():
    product = [path for path in library() if path.name != "testing.py"]
    used = {name for path in product for name in uses(path)}
    used |= {word for path in DOCUMENTS for word in re.findall(r"\w+", text(path))}
    unused = {
        f"{module}:{f'{owner}.' if owner else ''}{name}": f"{MODULES[module]}:{line}"
        for module in filter(strict, MODULES)
        for name, line, owner in public_names(module)
        if name not in used and not (owner and overrides(module, owner, name))
    }
    assert not unused, "\n".join(f"{unused[name]}: nobody uses {name}" for name in sorted(unused))
