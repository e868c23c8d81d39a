"""The sans-I/O wire codec: frames, packed and cold bodies, registries, errors, handshake."""
