"""``fedsim plan``: prints what a round of a run costs, and what the server learns in it, without running one."""

from __future__ import annotations

import fedsim
from fedsim import experiment
from fedsim.commands._configuration import configured
from fedsim.commands._training import use_devices
from fedsim.planning import duration


def main(arguments: list[str]) -> int:
    """Runs ``fedsim plan`` with these arguments and returns the exit status."""
    about = "Print what a round of the run with these options costs, without running a round or writing a file."
    config, settings, *_ = configured(arguments, "fedsim plan", about)
    use_devices(settings.num_devices)
    algorithm, sampler, _ = experiment.build(config, settings)
    plan = fedsim.plan(algorithm, sampler.cohort(0))
    print(plan)
    if plan.seconds is not None:
        total = duration(plan.seconds * config.rounds)
        print(f"{config.rounds:,} rounds: about {total}, without compilation, evaluation and checkpoints")
    if type(algorithm).apply is fedsim.Algorithm.apply:
        print(fedsim.audit(algorithm, sampler.cohort(0)))
    return 0
