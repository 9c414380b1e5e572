"""Peak memory of a function, by the profiler's record of every allocation on CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from moec.runtime.backends.torch import torch_memory


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak bytes of `work`, beyond the bytes before it."""
    torch_memory.POOL.release()  # a reused block is no allocation, so the profiler would miss it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0, "the profiler recorded no allocation"
    return most
