"""Who may import what of the client: no circles inside, one door for what is built on it."""

import ast
import graphlib

from tests.sources import library, module_name, nodes

CLIENT = "mooncake_store.client"


def imports_of(path):
    """What a file imports, those for type checkers and inside of functions included."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_modules_of_the_client_do_not_import_each_other_in_circles():
    inside = {
        module_name(path): imports_of(path)
        for path in library()
        if module_name(path).startswith(f"{CLIENT}.")
    }
    assert len(inside) > 20
    graph = {name: used & inside.keys() - {name} for name, used in inside.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_only_the_client_uses_its_private_modules():
    strangers = {
        f"{module_name(path)} uses {used}"
        for path in library()
        if not module_name(path).startswith(CLIENT)
        for used in imports_of(path)
        if used.startswith(f"{CLIENT}._")
    }
    assert not strangers
