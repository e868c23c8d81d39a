"""Commands of `mooncake` that belong to serving; found by name, imported when they are run."""

__all__: list[str] = []
