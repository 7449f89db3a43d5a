"""Global Resolution, Figures 4-5: acceptance and times by the target's temperature."""

from benchmarks.papers import global_resolution_acceptance, global_resolution_times
from benchmarks.papers.run import Run


def temperature(run: Run) -> None:
    global_resolution_acceptance.by_temperature(run)
    global_resolution_times.by_temperature(run)
