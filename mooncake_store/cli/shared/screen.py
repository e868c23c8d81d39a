"""A console on which no text steers the terminal, wherever it came from.

What is drawn is made of names and sentences of others, in tables and lines of many commands. Here
all of it passes, so that none has to be remembered there. Costs one look at each piece of text.
"""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mooncake_store.printable import printable

__all__ = ["Screen"]


class Screen(Console):
    """A console that shows as escapes what cannot be printed; its own commands it may send."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Draw it in pieces."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)
