"""``fedsim resume``: continues the run or the sweep in a folder."""

from __future__ import annotations

import textwrap

from fedsim import distributed, experiment
from fedsim.commands._deploy import NETWORK
from fedsim.commands._options import PROCESSES, RUNS_CODE, TRUST, Option, options_of, parse
from fedsim.commands._training import SWEEP_MODE, connected, train, use_devices
from fedsim.deployment import deploy, deployment_of
from fedsim.experiment import Settings
from fedsim.experiment.driving import check_trusted, stored_run
from fedsim.sweeps import change_rounds

_USAGE = f"""\
usage: fedsim resume FOLDER [OPTIONS]

Continue the run or the sweep in FOLDER with the configuration that is stored there; with --rounds N until round N.
{textwrap.fill(RUNS_CODE, 100)}
`fedsim resume FOLDER --help` lists the options."""
_ROUNDS = Option(
    "training",
    int | None,
    None,
    "New number of rounds. The result is that of a run that had this number from the start. It is refused where this is not "
    "possible, for example because the learning rate depends on the number.",
)


def main(arguments: list[str]) -> int:
    """Runs ``fedsim resume`` with these arguments and returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, *rest = arguments
    stored = experiment.read_sweep(folder) or experiment.read_config(folder)
    stored_run(folder, stored)
    options = (
        {"rounds": _ROUNDS} | options_of(Settings, stored["settings"], leave_out=["folder"]) | {"trust": TRUST} | PROCESSES
    )
    deployed = deployment_of(folder)
    if deployed is not None:
        if deployed["app"]:
            raise ValueError(
                f"The run in {folder} was deployed by an app: continue it with `flwr run`, as the app's README says."
            )
        options = {name: option for name, option in options.items() if name not in PROCESSES} | NETWORK
    if "seeds" in stored:
        options["sweep_mode"] = SWEEP_MODE._replace(default=stored.get("how"))
    chosen = parse(options, rest, "fedsim resume FOLDER", f"Continue the run or the sweep in a folder. {RUNS_CODE}")
    if not chosen.pop("trust"):
        check_trusted(folder, stored)
    how, rounds = chosen.pop("sweep_mode", None), chosen.pop("rounds")
    processes = {name: chosen.pop(name, None) for name in PROCESSES}
    network = {name: chosen.pop(name) for name in NETWORK if name in chosen}
    settings = Settings(**chosen, folder=folder)
    if deployed is None:
        settings = connected(settings, processes)
    else:
        use_devices(1)
    if rounds is not None:
        distributed.in_first(lambda: change_rounds(folder, rounds, settings))
        stored = experiment.read_sweep(folder) or experiment.read_config(folder)
    config, _ = stored_run(folder, stored)
    if deployed is not None:
        given = {name: deployed[name] for name in ("nodes", "secure", "node_data")}
        result = deploy(config, settings, **given, **network)
        return 128 + result.interrupted if result.interrupted else 0
    return train(config, settings, stored.get("varied", {}), stored.get("seeds"), how, stored.get("differing", ()))
