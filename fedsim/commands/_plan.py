"""``fedsim plan``: prints what a round of a run costs, and what the server learns in it, without running one."""

from __future__ import annotations

import dataclasses

import fedsim
from fedsim import experiment
from fedsim.commands._configuration import configured
from fedsim.commands._options import Option
from fedsim.commands._training import use_devices
from fedsim.execution import described_tpus
from fedsim.planning import duration
from fedsim.samplers import is_steered

# So many cohorts are looked at for one that has clients.
_MOST_COHORTS = 100

_TPU = Option(
    "execution (speed only)",
    str | None,
    None,
    "Plan the round on a TPU of this topology, such as v5e:4x8. It is compiled by libtpu, and no TPU is needed.",
)


def main(arguments: list[str]) -> int:
    """Runs ``fedsim plan`` with these arguments and returns the exit status."""
    about = "Print what a round of the run with these options costs, without running a round or writing a file."
    chosen = configured(arguments, "fedsim plan", about, {"tpu": _TPU})
    chosen.check_single("plan each run in a command of its own")
    config, settings = chosen.config, chosen.settings
    use_devices(settings.num_devices)
    algorithm, sampler, *_ = experiment.build(config, settings)
    if (topology := chosen.others["tpu"]) is not None:
        algorithm = _on_tpu(algorithm, topology)
    # A cohort of Poisson sampling may have no clients. The later rounds of a sampler that values steer are not known.
    known = 1 if is_steered(sampler) else min(config.rounds, _MOST_COHORTS)
    cohort = next(filter(len, map(sampler.cohort, range(known))), None) or sampler.cohort(0)
    plan = fedsim.plan(algorithm, cohort, measure=topology is None)
    print(plan)
    if plan.seconds is not None:
        total = duration(plan.seconds * config.rounds)
        print(f"{config.rounds:,} rounds: about {total}, without compilation, evaluation and checkpoints")
    if type(algorithm).apply is fedsim.Algorithm.apply:
        print(fedsim.audit(algorithm, cohort))
    return 0


def _on_tpu(algorithm: fedsim.Algorithm, topology: str) -> fedsim.Algorithm:
    """Returns the algorithm with the same execution, on chips that are only described."""
    execution = algorithm.execution
    if not isinstance(execution, fedsim.Pmap) or isinstance(execution.devices, int):
        raise ValueError(
            f"Expected an execution on all chips with --tpu, got {execution}: leave out --execution and --devices, or give "
            "--mesh 'clients=8, model=4', for example."
        )
    return dataclasses.replace(algorithm, execution=dataclasses.replace(execution, devices=described_tpus(topology)))
