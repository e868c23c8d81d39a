"""Stand-ins for packages for accelerators that SGLang imports and its storage classes do not need.

`stand_in(names)` lets every import of these packages succeed where they are not installed: their
names are classes that can be called, subclassed, subscripted and used as decorators, and do
nothing.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


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
    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


def stand_in(*names):
    """Put stand-ins for those of these packages that are not installed."""
    sys.meta_path.append(_Finder({name for name in names if not importlib.util.find_spec(name)}))
