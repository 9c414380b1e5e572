"""How much memory a piece of work takes, by the profiler's record of every allocation on CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from moec.runtime.backends.torch import torch_memory


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` holds at a time, beyond what was there before."""
    torch_memory.POOL.release()  # a block that is used again allocates nothing, so the profiler would miss it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0, "the profiler recorded no allocation"
    return most
