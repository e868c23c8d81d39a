"""Who is measured: this store, the engine alone, the original, raw sockets and files."""
