"""`deploy`, which trains on nodes that are processes of their own, and `check_deployable`, which says what cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fedsim import checks, datasets, rng
from fedsim.aggregators import DistributedMechanism, GaussianMechanism, LocallyNoised, StackAggregator
from fedsim.algorithm import Algorithm
from fedsim.configuration import Experiment, RunConfig, Settings, synchronization_of
from fedsim.deployment._build_deployed import OF_SERVER, build_deployed, has_server_steps
from fedsim.deployment._deployed import Deployed
from fedsim.deployment._deployed_steps import DeployedSteps
from fedsim.deployment._flower import FlowerNodes
from fedsim.deployment._nodes import NodeError
from fedsim.deployment._own_data import described_population
from fedsim.deployment._processes import FlowerProcesses, check_flower
from fedsim.durable_files import replace_text
from fedsim.execution import DividedRound
from fedsim.experiment import Result, run_experiment
from fedsim.experiment.driving import DEPLOYMENT, Checkpoints, RunFolder, is_personal, stop_rules
from fedsim.rounds import Staleness
from fedsim.samplers import checked_cohort
from fedsim.systems import Policy

_SIMULATE = "simulate it (fedsim run)"


def deploy(
    config: RunConfig, settings: Settings, *, nodes: int = 2, port: int | None = None, wait: float = 120.0,
    secure: bool = False, node_data: str | None = None, table: bool = True,
) -> Result:  # fmt: skip
    """Trains on nodes that are processes of their own on this machine and talk over Flower's network.

    Args:
      config: the configuration of the run.
      settings: how it is executed and reported, with a folder. A run in this folder is continued.
      nodes: the number of nodes, each with a share of the clients.
      port: of Flower's SuperLink; None chooses a free one.
      wait: the most seconds until all nodes have come.
      secure: whether messages are encrypted, and nodes without a key are refused; certificates and keys are made for this run.
      node_data: None if the nodes divide the clients of the run's dataset. Otherwise each node has its own clients, in a packed
        file or a folder with the dataset's files: the path, in which ``{node}`` is replaced by the node's number. The dataset
        then gives the test data and the form of the examples alone.
      table: whether to print the closing table.

    Raises:
      ImportError: Flower is not installed.
      ValueError: the run cannot be deployed, or the folder has a run that was not deployed, or on other nodes, or is in use.
      ConnectionError: nodes do not come, report an error, or are all lost.

    >>> deploy(RunConfig(attack="sign_flip"), Settings(folder="runs/a"), nodes=2)
    Traceback (most recent call last):
    ...
    ValueError: Expected a run that can be deployed, got attack='sign_flip': simulate it (fedsim run), or leave it out.
    """
    check_options(config, settings, node_data)
    checks.whole(1, nodes=nodes)
    check_flower()
    assert settings.folder is not None
    folder = Path(settings.folder)
    _check_folder(folder, nodes)
    given = for_nodes(config, settings, nodes, node_data)
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    replace_text(folder / "nodes" / "node.json", json.dumps(given | {"folder": str(folder.absolute() / "nodes")}) + "\n")
    commands = [[sys.executable, "-m", "fedsim.deployment", str(folder / "nodes" / "node.json"), str(i)] for i in range(nodes)]
    network = FlowerNodes(FlowerProcesses(commands, port=port, wait=wait, secure=secure))
    if settings.progress:
        print(f"Starting {nodes} nodes: processes on this machine, which end with this command.", file=sys.stderr)
    try:
        return run_on(network, config, settings, node_data=node_data, secure=secure, table=table)
    except BaseException:
        if not (folder / DEPLOYMENT).exists():  # The nodes have not come, so nothing is to be continued.
            (folder / "nodes" / "node.json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # Only an empty folder is deleted.
                (folder / "nodes").rmdir()
                folder.rmdir()
        raise


def run_on(
    network: FlowerNodes, config: RunConfig, settings: Settings, *,
    node_data: str | None = None, secure: bool = False, app: bool = False, table: bool = True,
) -> Result:  # fmt: skip
    """Trains on the nodes of a network, which it starts and ends.

    Args:
      network: the nodes.
      config, settings, node_data, secure, table: see `deploy`.
      app: whether Flower has started this process.

    Raises:
      ValueError: the run cannot be deployed, or the folder has a run that was not deployed, or on other nodes, or is in use.
      ConnectionError: nodes do not come, report an error, have other data than before, or are all lost.
    """
    assert settings.folder is not None
    folder = Path(settings.folder)
    _check_folder(folder, network.count)
    run = (deployment_of(folder) or {"run": secrets.token_hex(8)})["run"]
    execution = Deployed(nodes=network, folder=folder, name=run)
    if node_data is None:
        built = build_deployed(config, settings, execution)
        check_deployable(built, network.count)
    known: dict[str, Any] = {"nodes": network.count, "secure": secure, "node_data": node_data, "app": app, "run": run}
    with _terminated(), network:
        if node_data is not None:
            built = build_deployed(config, settings, execution, _splits_of_nodes(config, network))
            check_deployable(built, network.count)
            known["populations"] = _same_populations(folder, network)
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / DEPLOYMENT, json.dumps(known) + "\n")
        execution.check(checked_cohort(built.sampler, 0))
        if has_server_steps(config):
            built = _with_server_steps(built, config, execution)
        return run_experiment(built, config, settings, progress=settings.progress, table=table)


def _splits_of_nodes(config: RunConfig, network: FlowerNodes) -> datasets.FederatedSplits:
    """Returns the run's dataset, of which the clients of the nodes replace the training data."""
    splits = datasets.load(config.drawn_dataset, data=config.data)
    told = {number: facts["data"] for number, facts in network.introductions().items()}
    population, network.first = described_population(told, splits.train)
    return dataclasses.replace(splits, train=population)


def _same_populations(folder: Path, network: FlowerNodes) -> list[Any]:
    """Returns what identifies the data of each node. Raises ``NodeError`` if the run in the folder began with others."""
    now = [facts["population"] for _, facts in sorted(network.introductions().items())]
    for number, (before, own) in enumerate(zip((deployment_of(folder) or {}).get("populations", now), now, strict=True)):
        for what in own:
            if own[what] != before[what]:
                raise NodeError(
                    f"Node {number} has other data than when the run in {folder} began ({what}: {before[what]!r}, now "
                    f"{own[what]!r}): restore them, or begin a new run in another folder."
                )
    return now


def check_options(config: RunConfig, settings: Settings, node_data: str | None = None) -> None:
    """Raises ``ValueError`` if options of a run have no meaning in a deployment.

    >>> check_options(RunConfig(), Settings(folder="runs/a"))
    >>> check_options(RunConfig(message_loss=0.1), Settings(folder="runs/a"))
    Traceback (most recent call last):
    ...
    ValueError: Expected a run that can be deployed, got message_loss=0.1: simulate it (fedsim run), or leave it out.
    """
    if settings.folder is None:
        raise ValueError("Expected a folder for a deployment, got folder=None: give one.")
    simulated = [name for name in config.clock_options if name not in OF_SERVER]
    given = {name: getattr(config, name) for name in (*simulated, "attack", "topology") if getattr(config, name)}
    for name, value in given.items():
        raise ValueError(f"Expected a run that can be deployed, got {name}={value!r}: {_SIMULATE}, or leave it out.")
    if any(getattr(rule, "seconds", None) is not None for rule in stop_rules(config.stop_when)):
        raise ValueError(
            f"Expected no limit of simulated seconds in a deployment, which has no virtual clock, got stop_when="
            f"{config.stop_when!r}: limit megabytes or rounds."
        )
    for name in ("validation", "labels") if node_data is not None else ():
        if (value := getattr(config, name)) is not None:
            raise ValueError(
                f"Expected {name}=None with data of the nodes' own, got {name}={value!r}: the server has no examples of theirs "
                "to choose from. Leave it out."
            )
    speed = {name: getattr(settings, name) for name in ("execution", "devices", "mesh", "example_storage")}
    allowed: dict[str, tuple[Any, ...]] = {
        "execution": ("auto", "jit"), "devices": (None, 1), "mesh": (None,), "example_storage": ("auto", "resident")
    }  # fmt: skip
    for name, value in speed.items():
        if value not in allowed[name]:
            raise ValueError(
                f"Expected nodes that use one device each and hold their examples on it, got {name}={value!r}: leave it out."
            )


def check_deployable(built: Experiment, nodes: int) -> None:
    """Raises an error if a run cannot be deployed on so many nodes.

    Args:
      built: what a run consists of, from `fedsim.configuration.build`.
      nodes: the number of nodes.

    Raises:
      ValueError: it cannot; the message says why and what to do.

    >>> from fedsim.configuration import build
    >>> check_deployable(build(RunConfig(algorithm="fedadam"), Settings()), nodes=2)
    >>> check_deployable(build(RunConfig(aggregator="krum(attackers=1)"), Settings()), nodes=2)
    Traceback (most recent call last):
    ...
    ValueError: Krum cannot be deployed, because it needs every single update and nodes send sums: simulate it (fedsim run).
    """
    algorithm, cohort = built.algorithm, checked_cohort(built.sampler, 0)
    data, name = cohort.data, type(algorithm).__name__
    reason = ""
    if hasattr(algorithm, "topology"):
        reason = "it has no server"
    elif type(algorithm).apply is not Algorithm.apply:
        reason = "its rounds are loops in Python, of which the clients' part cannot be sent to nodes"
    elif algorithm.staleness not in (None, Staleness(bound=0), Staleness(bound=0, mixing=True)):
        reason = "its clients start from models of earlier rounds"
    elif is_personal(algorithm):
        reason = "clients have models of their own, which stay at the nodes, so the server cannot evaluate them"
    aggregator: Any = algorithm.aggregator
    while not reason and aggregator is not None:
        if isinstance(aggregator, StackAggregator):
            name, reason = type(aggregator).__name__, "it needs every single update and nodes send sums"
        elif isinstance(aggregator, GaussianMechanism):
            name, reason = type(aggregator).__name__, "nodes would send sums without its noise, which the server adds"
        elif isinstance(aggregator, DistributedMechanism | LocallyNoised):
            name, reason = (
                type(aggregator).__name__,
                "the server sends the keys of the clients' noise, so it could remove the noise",
            )
        elif aggregator.is_secure and algorithm.staleness is not None:
            name = type(aggregator).__name__
            reason = "with a synchronization model nodes send single updates, and only the sums of nodes have masks"
        aggregator = getattr(aggregator, "inner", None)
    if reason:
        raise ValueError(f"{name} cannot be deployed, because {reason}: {_SIMULATE}.")
    if nodes > data.num_clients:
        raise ValueError(f"Expected nodes <= {data.num_clients} (the clients), got nodes={nodes}: use fewer.")
    like = jax.eval_shape(algorithm.init, key := rng.typed(cohort.key))
    DividedRound(algorithm, like, data, slots=cohort.slots, key=key.dtype)  # It checks the calls of a round.


def _with_server_steps(built: Experiment, config: RunConfig, deployed: Deployed) -> Experiment:
    """Lets the synchronization model of a configuration decide when the server aggregates."""
    policy, model = Policy(timeout=config.response_timeout, late=config.late_updates), synchronization_of(config)
    execution = DeployedSteps(
        nodes=deployed.nodes, folder=deployed.folder, name=deployed.name, sampler=built.sampler, synchronization=model,
        policy=policy,
    )  # fmt: skip
    return built._replace(algorithm=dataclasses.replace(built.algorithm, execution=execution))


def deployment_of(folder: str | Path) -> dict[str, Any] | None:
    """Returns how the run in a folder was deployed: the arguments ``nodes``, ``secure`` and ``node_data`` of `deploy`.

    None if it was not deployed. ``app`` says whether it was by an app, see `write_app`. ``run`` is the name under which nodes
    store what their clients keep.

    >>> deployment_of("no such folder") is None
    True
    """
    path = Path(folder) / DEPLOYMENT
    usual = {"secure": False, "node_data": None, "app": False, "run": ""}
    return usual | json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _check_folder(folder: Path, nodes: int) -> None:
    """Raises ``ValueError`` if a folder has a run that nodes cannot go on with, or that is in use."""
    if RunFolder(folder).config.exists():  # The files of its nodes are written before the run locks its folder.
        RunFolder(folder).lock().close()
    known = (deployment_of(folder) or {}).get("nodes")
    if known is None and Checkpoints(folder / "checkpoints").rounds():
        raise ValueError(
            f"The run in {folder} was not deployed, so its nodes have nothing to go on with: choose another folder."
        )
    if known not in (None, nodes):
        raise ValueError(f"Expected nodes={known}, as the run in {folder} has, got nodes={nodes}: the clients belong to these.")


def for_nodes(config: RunConfig, settings: Settings, nodes: int, node_data: str | None) -> dict[str, Any]:
    """Returns what the workers of nodes read."""
    own = dataclasses.asdict(dataclasses.replace(settings, execution="jit", devices=None))
    return {"config": dataclasses.asdict(config), "settings": own, "nodes": nodes, "node_data": node_data}


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Makes SIGTERM an exception, so that all processes are ended first."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # Python allows signal handlers only in the main thread.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
