"""The store's errors: the tree of `transfer_engine.errors` under the name users look for."""

from transfer_engine.errors import *  # noqa: F403
from transfer_engine.errors import __all__ as __all__
