"""Stand-ins for packages that an engine imports and a test of its storage class does not need.

`stand_in()` lets every import of a package that is not installed succeed: its names are classes
that can be called, subclassed, subscripted and used as decorators, and do nothing.
"""

import importlib.abc
import importlib.machinery
import sys
import types

# Packages that look for these do without them in a better way than with a stand-in.
OPTIONAL = {"colorama", "cupy", "mooncake", "numba", "opentelemetry", "rich"}


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Absent(metaclass=_Anything):
    """A name of a package that is not there."""

    def __init__(self, *arguments, **options):
        pass

    def __call__(self, *arguments, **options):
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __class_getitem__(cls, item):
        return cls


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = "99.0.0"
        module.__getattr__ = _name
        return module

    def exec_module(self, module):
        pass


def _name(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, real):
        self._real = real

    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top in self._real or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def stand_in(*real, also=()):
    """Put stand-ins for all packages but `real` ones; for those of `also` even if installed."""
    # What the store itself needs is imported first, with its optional parts as they are.
    import mooncake.store  # noqa: F401
    import torch  # noqa: F401

    from mooncake_store.client._setup import load_kernels

    load_kernels()
    installed = {name.partition(".")[0] for name in sys.modules}
    sys.meta_path.append(_Finder(OPTIONAL | installed | set(real)))
    for name in also:
        spec = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = _Loader().create_module(spec)
