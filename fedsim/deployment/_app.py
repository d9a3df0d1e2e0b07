"""`write_app`: a run as an app for a federation that exists; and the parts of this app that run inside of Flower."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedsim import checks
from fedsim._version import __version__
from fedsim.configuration import RunConfig, Settings, fields_that_name
from fedsim.datasets import is_file
from fedsim.deployment import _relay
from fedsim.deployment._build_deployed import build_deployed
from fedsim.deployment._deploy import check_deployable, check_options, for_nodes, run_on
from fedsim.deployment._flower import FlowerNodes
from fedsim.deployment._nodes import NodeError
from fedsim.deployment._processes import PROJECT
from fedsim.pinned_files import unpinned

_POLL_SECONDS = 0.1
_CONFIG = """
[tool.flwr.app.config]
folder = {folder}
wait = {wait}
"""
_README = """\
# A run of fedsim as an app for Flower

`fedsim_app/run.json` is the configuration: {title}, on {nodes} nodes. Flower brings the app to all nodes.

1. Install fedsim {version} with the extras `[run,flower]` on every machine, with the same version of JAX. Activate that
   environment where you start processes of Flower, because they start others. They must not install another environment:

   ```
   flower-superlink --disable-runtime-dependency-installation --host ADDRESS \\
     --ssl-ca-certfile FILE --ssl-certfile FILE --ssl-keyfile FILE
   ```

   `fedsim.deployment.Certificates` makes certificates. For a trial without them, on one machine, give `--insecure` instead,
   here and in step 2, and `insecure = true` in step 3.

2. At each node, with its own number, from 0 to {last}:

   ```
   flower-supernode --superlink ADDRESS:8000 --root-certificates FILE --node-config '{example}'
   ```

   Several nodes on one machine need a `--port` each.
   {data}
   What clients keep between rounds is stored in `fedsim` in Flower's home, in a folder for each run folder;
   `folder="DIR"` in the node's configuration chooses another place.

3. Name the SuperLink in `config.toml` of Flower's home, and run:

   ```
   [superlink.NAME]
   address = "ADDRESS:8000"
   root-certificates = "FILE"
   ```

   ```
   flwr run . NAME --stream -c 'folder="/srv/fedsim/run"'
   ```

{files}The run folder, with metrics and checkpoints, is on the SuperLink's machine. `fedsim export FOLDER FILE.safetensors`
takes the model out, also while the run goes on.

`flwr stop RUN NAME` ends the run early. The same `flwr run` goes on after the last checkpoint, and trains nothing if all
rounds are done; with another folder it begins another run. A folder that a run is using is refused. The worker of a run at a
node takes memory until no message has come for ten minutes; `idle=SECONDS` in the node's configuration chooses another time.
With masked sums (`secure_mean`) it stays until the SuperNode ends.
"""
_SHARES = """\
Every node loads the dataset, and keeps the clients whose position modulo the number of nodes is its number. `data="DIR"` in
   the node's configuration says where the dataset's files are, if they are not downloaded."""
_FILES = """\
These files must be on the SuperLink's machine, under the same paths as where this app was written: {places}.

"""
_OWN = "`data` is the node's own data: a packed file, or a folder with the dataset's files."


def write_app(
    folder: str | Path,
    config: RunConfig,
    settings: Settings,
    *,
    nodes: int = 2,
    node_data: str | None = None,
    wait: float = 120.0,
) -> None:
    """Writes a run as an app for a federation of Flower that exists, with a README.md that says how to start it there.

    The app has no files with data or parameters. README.md names those that the SuperLink's machine needs.

    Args:
      folder: of the app, which must be empty or not exist.
      config, settings: of the run. The app's ``folder``, on the machine of the SuperLink, is that of the settings.
      nodes: the number of nodes.
      node_data: None if every node loads the run's dataset and keeps its share of the clients. Otherwise where the nodes' own
        data are, see `deploy`; a node's configuration can name another place, ``data="PATH"``.
      wait: the most seconds until all nodes have come; ``flwr run -c wait=SECONDS`` gives another number.

    Raises:
      ValueError: the run cannot be deployed, or its configuration names a file with code or data, which nodes do not have.
      FileExistsError: the folder has files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_app(folder, RunConfig(rounds=3), Settings(folder="run"), nodes=4)
    >>> sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))[:3]
    ['README.md', 'fedsim_app/__init__.py', 'fedsim_app/client.py']
    """
    folder = Path(folder)
    check_options(config, settings, node_data)
    checks.whole(1, nodes=nodes)
    checks.positive(wait=wait)
    for name in fields_that_name("code"):
        if ".py:" in str(getattr(config, name, "")):
            raise ValueError(
                f"Expected names that all nodes know, got {name}={getattr(config, name)!r}, a file on this machine: "
                "install it as a package on every machine, and give MODULE:NAME."
            )
    if is_file(config.dataset):
        raise ValueError(
            f"Expected a dataset that all nodes can describe, got dataset={config.dataset!r}, a file on this machine: give a "
            "dataset of fedsim, or a loader MODULE:NAME of a package that is installed on every machine."
        )
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"Expected an empty folder for the app, got {folder}, which has files: choose another one.")
    if node_data is None:
        check_deployable(build_deployed(config, settings), nodes)
    package = folder / "fedsim_app"
    package.mkdir(parents=True)
    given = for_nodes(config, settings, nodes, node_data)
    (package / "run.json").write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
    project = PROJECT.format(name="fedsim-run") + _CONFIG.format(folder=json.dumps(settings.folder), wait=float(wait))
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    shutil.copy(_relay.__file__, package / "relay.py")
    file = 'Path(__file__).with_name("run.json")'
    for side, origin in (("server", "fedsim.deployment"), ("client", "fedsim_app.relay")):
        code = f"from pathlib import Path\n\nfrom {origin} import {side}_app\n\napp = {side}_app({file})\n"
        (package / f"{side}.py").write_text(code, encoding="utf-8")
    number = "partition-id=0"
    places = [
        f"`{unpinned(place)}` (--{name.replace('_', '-')})"
        for name in ("data", "init_from")
        if (place := getattr(config, name))
    ]
    text = _README.format(
        title=f"{config.algorithm} on {config.dataset}",
        nodes=nodes,
        last=nodes - 1,
        version=__version__,
        example=number if node_data is None else f'{number} data="{node_data}"',
        data=_SHARES if node_data is None else _OWN,
        files=_FILES.format(places=", ".join(places)) if places else "",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def server_app(file: str | Path) -> Any:
    """Returns Flower's ``ServerApp`` that runs the configuration of a file which `write_app` has written.

    >>> server_app("run.json")  # doctest: +ELLIPSIS
    <flwr.serverapp.server_app.ServerApp object at ...>
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        given = json.loads(Path(file).read_text(encoding="utf-8"))
        chosen = {"folder": str(context.run_config["folder"]), "progress": False}
        config, settings = RunConfig.from_json(given["config"]), Settings.from_json(given["settings"] | chosen)
        network = FlowerNodes(ExistingNetwork(grid, given["nodes"], float(context.run_config["wait"])))
        run_on(network, config, settings, node_data=given["node_data"], app=True)

    return app


class ExistingNetwork:
    """The nodes that have come to a SuperLink, as `FlowerNodes` needs them; other people start and end their processes.

    Args:
      grid: Flower's, which a ServerApp has.
      count: the number of nodes.
      wait: the most seconds until all nodes have come.

    Attributes:
      driver: passes messages to the grid, within the context.

    >>> with ExistingNetwork(None, 2, 0.0) as network:
    ...     network.wait_until(lambda: False, "no node has come")
    Traceback (most recent call last):
    ...
    fedsim.deployment._nodes.NodeError: After 0 s no node has come: start the SuperNodes, or wait longer (-c wait=SECONDS).
    """

    driver: Connection

    def __init__(self, grid: Any, count: int, wait: float) -> None:
        self.count, self._grid, self._wait = count, grid, wait

    def __enter__(self) -> ExistingNetwork:
        self._until = time.monotonic() + self._wait
        self.driver, other = Pipe()
        self._thread = threading.Thread(target=_relay.pass_on, args=(self._grid, other), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()
        self._thread.join(timeout=10)

    def wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Waits until a condition holds. Raises ``NodeError`` if the time is over until which nodes must have come."""
        while not condition():
            if time.monotonic() > self._until:
                raise NodeError(f"After {self._wait:g} s {otherwise}: start the SuperNodes, or wait longer (-c wait=SECONDS).")
            time.sleep(_POLL_SECONDS)

    def why_dead(self, number: int) -> str:
        """Returns "": Flower reports a node without a heartbeat in its replies."""
        return ""

    def is_ready(self, number: int) -> bool:
        """Returns True: a node that has registered answers."""
        return True

    def logs(self) -> str:
        """Returns where the messages of the processes are."""
        return "`flwr log` and the SuperNodes show more."

    def restart(self, number: int) -> None:
        """Starts nothing: other people start the processes again."""
