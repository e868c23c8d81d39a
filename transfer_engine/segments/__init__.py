"""Memory, files and devices that others may be allowed to read and write."""
