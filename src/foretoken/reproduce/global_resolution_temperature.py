"""Global Resolution, Figures 4-5: acceptance and times by the target's temperature."""

from foretoken.reproduce import global_resolution_acceptance, global_resolution_times
from foretoken.reproduce.run import Run


def temperature(run: Run) -> None:
    global_resolution_acceptance.by_temperature(run)
    global_resolution_times.by_temperature(run)
