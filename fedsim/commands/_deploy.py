"""``fedsim deploy``: trains as ``fedsim run`` does, on nodes that are processes of their own."""

from __future__ import annotations

from fedsim.commands._configuration import configured
from fedsim.commands._options import Option
from fedsim.commands._run import with_folder
from fedsim.commands._training import use_devices
from fedsim.deployment import deploy

_GROUP = "nodes"
NETWORK = {
    "port": Option(_GROUP, int | None, None, "Port of Flower's SuperLink on this machine; default: a free one."),
    "wait": Option(_GROUP, float, 120.0, "Most seconds until all nodes have come."),
    "secure": Option(
        _GROUP,
        bool,
        False,
        "Encrypt messages (TLS) and refuse nodes without a key; certificates and keys are made for the run.",
    ),
}
_NODES = Option(_GROUP, int, 2, "Number of nodes. Each has a share of the clients, whose data stay there.")


def main(arguments: list[str]) -> int:
    """Runs ``fedsim deploy`` with these arguments and returns the exit status."""
    about = "Train as `fedsim run` does, on nodes: processes on this machine that talk over Flower's network."
    chosen = configured(arguments, "fedsim deploy", about, {"nodes": _NODES} | NETWORK)
    if chosen.varied or chosen.seeds:
        raise ValueError("Expected a single run to deploy, got several values or seeds: deploy each run alone.")
    use_devices(1)
    result = deploy(chosen.config, with_folder(chosen.config, chosen.settings), **chosen.others)
    return 128 + result.interrupted if result.interrupted else 0
