"""`mooncake mount`: a namespace of the store as a directory, through FUSE.

`nodes.py` holds what is open, `operations.py` answers the kernel, `program.py` mounts and
unmounts. Needs libfuse (Debian: fuse3) and the `fuse` extra. See docs/guide/mount.md.
"""
