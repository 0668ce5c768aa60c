"""A torch.profiler trace of a few training steps."""

from pathlib import Path

import torch

TRACE_FILE = "profile.json"
"""Name of the trace in a run folder; chrome://tracing and Perfetto open it."""

WARM_UP, STEPS = 3, 4
"""Steps that are left out (compilation, caches), and steps that are recorded."""


def profiler(folder: Path) -> torch.profiler.profile:
    """A profiler that is told of every step by its `step()`, and writes one trace into `folder`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(finished: torch.profiler.profile) -> None:
        finished.export_chrome_trace(str(folder / TRACE_FILE))
        print(finished.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))

    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WARM_UP, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=write,
    )
