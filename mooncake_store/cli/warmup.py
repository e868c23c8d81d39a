"""`mooncake warmup`: compile every numba kernel once, so that no later command has to."""

import time

from mooncake_store.cli.shared.app import JsonOption, command, emit, progress


@command(
    ("mooncake warmup", "compile what is not compiled yet; the result is kept on disk"),
    ("mooncake warmup --json", "the same, with the count and the seconds for a program"),
)
def warmup(as_json: JsonOption = False) -> None:
    """Compile the numba kernels now instead of at their first use."""
    from mooncake_store.program import kernels

    started = time.perf_counter()
    with progress("loading kernels"):
        modules = kernels.warmup()
    seconds = round(time.perf_counter() - started, 3)
    emit(
        {"kernel_modules": modules, "seconds": seconds},
        as_json=as_json,
        human=lambda: f"{modules} kernel modules are ready, after {seconds:.1f} s",
    )
