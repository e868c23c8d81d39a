"""A program whose text is an argument: `python -m tests.run_code TEXT ARGUMENTS`.

As `python -c` does it, but it may be forked from a warm process (`tests.warm`).
"""

import sys

if __name__ == "__main__":
    sys.argv[0] = "-c"
    text = sys.argv.pop(1)
    exec(compile(text, "<text>", "exec"), {"__name__": "__main__"})
