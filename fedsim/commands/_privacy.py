"""``fedsim privacy``: prints how much a run reveals of a client, and draws it against the number of rounds."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fedsim import experiment, plots
from fedsim.commands._configuration import configured
from fedsim.commands._options import RUNS_CODE, TRUST, Option
from fedsim.commands._training import options_of_stored_run, use_devices
from fedsim.experiment.driving import RunFolder, described_guarantee, is_sweep, stored_run
from fedsim.privacy import actual

_ABOUT = (
    "Print ε of differential privacy of the finished rounds of the run in FOLDER, or of all rounds of a run with these "
    "options, without running a round."
)
_OUT = {"out": Option("output", str | None, None, "File of a picture of ε against the number of rounds, such as epsilon.png.")}
_POINTS = 10


def main(arguments: list[str]) -> int:
    """Runs ``fedsim privacy`` with these arguments and returns the exit status."""
    is_stored = bool(arguments) and not arguments[0].startswith("-")
    if is_stored:
        folder, *rest = arguments
        if is_sweep(folder):
            raise ValueError(f"{folder} holds a sweep: give the folder of one of its runs.")
        about = f"{_ABOUT} {RUNS_CODE}"
        chosen, settings = options_of_stored_run(folder, rest, _OUT | {"trust": TRUST}, "fedsim privacy FOLDER", about)
        config, _ = stored_run(folder, experiment.read_config(folder))
        rounds = max((line["round"] for line in experiment.read_metrics(RunFolder(Path(folder)).metrics)), default=0)
    else:
        found = configured(arguments, "fedsim privacy [FOLDER]", _ABOUT, _OUT)
        found.check_single("give each value in a command of its own")
        config, settings, chosen, rounds = found.config, found.settings, found.others, found.config.rounds
        use_devices(settings.num_devices)
    built = experiment.build(config, settings)
    guarantee = built.privacy
    if guarantee is None:
        raise ValueError(
            "Expected a run with differential privacy, got one without: give --dp-epsilon 8 or --dp-noise 1, with --dp-delta "
            "and --dp-clip."
        )
    print(f"after {rounds} of {config.rounds} rounds")
    print("\n".join(described_guarantee(guarantee, rounds)))
    if is_stored and rounds:
        print("\n".join(textwrap.wrap(actual(guarantee, map(built.sampler.cohort, range(rounds))).text(), 100)))
    counts = sorted({max(1, round(config.rounds * i / _POINTS)) for i in range(_POINTS + 1)})
    epsilons = [guarantee.epsilon(count) for count in counts]
    print("\nrounds" + "".join(f"{count:>9}" for count in counts) + "\nε     " + "".join(f"{x:>9.3f}" for x in epsilons))
    if chosen["out"]:
        plots.plot_epsilon(counts, epsilons, delta=guarantee.delta).savefig(chosen["out"])
        print(f"written    {chosen['out']}")
    return 0
