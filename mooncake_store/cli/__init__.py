"""The `mooncake` command: one module per subcommand, loaded when it is asked for."""

__all__: list[str] = []
