"""``fedsim deploy``: trains as ``fedsim run`` does, on nodes that are processes of their own."""

from __future__ import annotations

from pathlib import Path

from fedsim.commands._configuration import configured
from fedsim.commands._options import Option
from fedsim.commands._run import with_folder
from fedsim.commands._training import use_devices
from fedsim.deployment import deploy, write_app

_GROUP = "nodes"
NETWORK = {
    "port": Option(_GROUP, int | None, None, "Port of Flower's SuperLink on this machine; default: a free one."),
    "wait": Option(_GROUP, float, 120.0, "Most seconds until all nodes have come."),
}
_NODES = {
    "nodes": Option(_GROUP, int, 2, "Number of nodes. Each has a share of the clients, whose data stay there."),
    "node_data": Option(
        _GROUP,
        str | None,
        None,
        "The nodes' own data, instead of shares of the dataset: a packed file, or a folder with the dataset's files, with "
        "{node} for the node's number. The dataset gives the test data.",
    ),
    "secure": Option(
        _GROUP,
        bool,
        False,
        "Encrypt messages (TLS) and refuse nodes without a key; certificates and keys are made for the run.",
    ),
    "app": Option(
        _GROUP, str | None, None, "Folder: write the run as an app for a federation of Flower that exists, and do not start it."
    ),
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim deploy`` with these arguments and returns the exit status."""
    about = "Train as `fedsim run` does, on nodes: processes on this machine that talk over Flower's network."
    chosen = configured(arguments, "fedsim deploy", about, _NODES | NETWORK)
    chosen.check_single("deploy each run alone")
    use_devices(1)
    settings = with_folder(chosen.config, chosen.settings)
    if (app := chosen.others.pop("app")) is not None:
        for name in ("port", "secure"):
            if chosen.others[name]:
                raise ValueError(
                    f"Expected no --{name} with --app, got {name}={chosen.others[name]}: it is chosen where Flower's SuperLink "
                    "is started, see the app's README.md. Leave it out."
                )
        given = {name: chosen.others[name] for name in ("nodes", "node_data", "wait")}
        write_app(app, chosen.config, settings, **given)
        print(f"{app}/README.md says how to run the app.")
        return 0
    if (place := chosen.others["node_data"]) is not None:  # The run may be continued from another folder.
        chosen.others["node_data"] = str(Path(place).expanduser().resolve())
    result = deploy(chosen.config, settings, **chosen.others)
    return 128 + result.interrupted if result.interrupted else 0
