"""`Node`: the part of a federation that has some of the clients, with their data and what they keep between rounds."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from fedsim import rng
from fedsim._version import __version__
from fedsim.aggregators import SecureMean
from fedsim.algorithm import Algorithm
from fedsim.configuration import RunConfig, Settings
from fedsim.data import ClientRows, Cohort, population_identity
from fedsim.datasets import FederatedSplits, describe
from fedsim.deployment import _relay
from fedsim.deployment._build_deployed import build_deployed
from fedsim.deployment._encoding import decode, encode
from fedsim.deployment._masks import Masks
from fedsim.deployment._nodes import Blobs
from fedsim.deployment._own_data import describe_data, load_own_data
from fedsim.deployment._record import replace_bytes
from fedsim.execution import DividedRound
from fedsim.experiment.driving import Checkpoints, rows_identity
from fedsim.names import look_up, parse_call
from fedsim.rounds import FederatedState, Operands
from fedsim.samplers import SAMPLERS, Sampler, checked_cohort

# What all clients of a round get, beside what is known of each client.
_SHARED = ("server_memory", "work", "zero", "accumulate", "merge")


class _WithheldError(Exception):
    """Why a node does not send the sum of a round."""


class Node:
    """Some of the clients: those whose positions in the population are ``number``, ``number + nodes``, and so on.

    Args:
      algorithm: that of the server.
      sampler: of the population, of which the node keeps the examples of its own clients; with ``own``, of these alone.
      number: of the node, from 0.
      nodes: how many there are.
      folder: where the node stores what its clients keep, so that it survives the node's process.
      own: whether the node has data of its own, which no other process knows.

    A node's process serves one run. The folder may have what clients keep in several, each under the run's name.

    A node whose sums are masked does not send the sum of a round in which an update of its clients does not count. The server
    asks for a sum before it can know of such updates, so that the total could be that of fewer clients than it may see.

    Raises:
      ValueError: the algorithm does not fit the data.

    A node answers in bytes what it is asked in bytes:

    >>> import tempfile, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm, sampler = fedsim.algorithms.Histogram(bins=2), fedsim.UniformSampler(data, clients=2, seed=0)
    >>> node = Node(algorithm, sampler, 1, 2, Path(tempfile.mkdtemp()))
    >>> decode(node.answer({"clients": encode([], {"ask": "who"})}))[1]["node"], node.data.client_ids
    (1, ['1'])
    """

    def __init__(
        self, algorithm: Algorithm, sampler: Sampler, number: int, nodes: int, folder: Path, *, own: bool = False
    ) -> None:
        data = checked_cohort(sampler, 0).data
        algorithm.check(data)
        self.number, self._algorithm = number, algorithm
        self._facts = {"node": number, "versions": versions(), "population": population_identity(data)}
        self.data = data if own else data.select(data.client_ids[number::nodes])
        if own:
            self._facts["data"] = describe_data(data)
        self._nodes = nodes
        self._server = jax.eval_shape(algorithm.init, jax.random.key(0))
        self._rounds: dict[Any, DividedRound] = {}
        self._masks: Masks | None = None
        if isinstance(algorithm.aggregator.innermost, SecureMean):
            self._masks = Masks()
            self._facts["key"] = self._masks.public
        self._folder = folder
        self._run_name: str | None = None  # known from the first round on
        self._checkpoints: Checkpoints | None = None
        self._memories: tuple[int, ClientRows | None] | None = None  # and the number of the rounds after which they are these

    @property
    def has_masks(self) -> bool:
        """Whether its sums are masked, with keys that end with this process."""
        return self._masks is not None

    def answer(self, blobs: Blobs) -> bytes:
        """Returns the answer to a message of the server; an error becomes an answer that says it."""
        began = time.perf_counter()
        try:
            _, facts = decode(blobs["clients"])
            if facts.get("ask") == "who":
                return encode([], self._facts)
            arrays = self._run_each(blobs, facts) if "each" in facts else self._run(blobs, facts)
        except _WithheldError as reason:
            return encode([], {"node": self.number, "seconds": time.perf_counter() - began, "withheld": str(reason)})
        except Exception as error:
            return encode([], {"node": self.number, "error": f"{type(error).__name__}: {error}"})
        return encode(arrays, {"node": self.number, "seconds": time.perf_counter() - began})

    def _run(self, blobs: Blobs, facts: Mapping[str, Any]) -> list[Any]:
        """Runs the clients of a message; returns the leaves of the `fedsim.execution.Answer`."""
        round, operands, cohort = self._begun(blobs, facts)
        at = facts["round"]
        memories = self._memories_after(at, round, facts)
        answer, memories = round.run_clients(operands, cohort, memories)
        if self._masks is not None:
            self._check_all_count(cohort, answer.entries)
        if memories is not None and self._checkpoints is not None:
            self._checkpoints.save(at + 1, FederatedState((), memories))
        self._memories = at + 1, memories
        leaves = jax.tree.leaves(answer.accumulator)
        if self._masks is not None:
            sums = [np.asarray(leaf) for leaf in leaves if leaf.dtype == np.uint32]
            keys = {int(number): key for number, key in facts["keys"].items()}
            masked = iter(self._masks.added(sums, self.number, keys, round=at))
            leaves = [next(masked) if leaf.dtype == np.uint32 else np.zeros_like(leaf) for leaf in leaves]
        return [*leaves, *jax.tree.leaves(answer.entries)]

    def _check_all_count(self, cohort: Cohort, entries: Mapping[str, Any]) -> None:
        """Raises if a client has taken a step and its update does not count."""
        took_part = cohort.num_steps(self._algorithm.batches) > 0
        if missing := np.count_nonzero(took_part & (np.asarray(entries["weight"]) == 0)):
            kind = FloatingPointError if self._algorithm.nonfinite == "raise" else _WithheldError
            raise kind(
                f"{missing} of its updates held a NaN or an infinity or had weight 0, so the total may be of too few clients "
                "(lower the client learning rate, or check the weights)"
            )

    def _run_each(self, blobs: Blobs, facts: Mapping[str, Any]) -> list[Any]:
        """Runs the clients of a message; returns the leaves of the `fedsim.execution.Update` of each.

        What a client keeps is stored under the number of the dispatch, because it counts only if the server says so later.
        """
        round, operands, cohort = self._begun(blobs, facts)
        clients, rows, seen = np.asarray(operands.clients.position).tolist(), (), np.zeros(len(cohort), bool)
        like = round.memory_shapes
        if like != ():
            paths = [self._folder_of(facts) / "rows" / f"{client}" for client in clients]
            of_clients = [_read_row(path / f"{row}", like) for path, row in zip(paths, facts["row"], strict=True)]
            rows = jax.tree.map(lambda *leaves: np.stack(leaves), *(row for row, _ in of_clients))
            seen = np.array([was_seen for _, was_seen in of_clients])
        updates, rows, seen = round.run_each(operands, cohort, rows, seen)
        if like != ():
            for at, (path, number, kept) in enumerate(zip(paths, facts["each"], facts["kept"], strict=True)):
                path.mkdir(parents=True, exist_ok=True)
                for other in path.iterdir():
                    if other.name not in map(str, (*kept, facts["row"][at])):
                        other.unlink()
                replace_bytes(
                    path / f"{number}", encode([leaf[at] for leaf in jax.tree.leaves(rows)], {"seen": bool(seen[at])})
                )
        return jax.tree.leaves([tuple(update) for update in updates])

    def _begun(self, blobs: Blobs, facts: Mapping[str, Any]) -> tuple[DividedRound, Operands, Cohort]:
        """Returns the round of a message, what its clients get, and these clients."""
        if self._run_name is None:
            self._run_name = facts["run"]
        if facts["run"] != self._run_name:
            raise ValueError(
                f"Expected rounds of the run {self._run_name!r}, got one of the run {facts['run']!r}: start a process of the "
                "node for each run."
            )
        (of_clients, _), (shared, _) = decode(blobs["clients"]), decode(blobs["shared"])
        work = of_clients.pop() if facts["has_work"] else None
        key = of_clients[-1].dtype
        if (facts["slots"], key) not in self._rounds:
            made = DividedRound(self._algorithm, self._server, self.data, slots=facts["slots"], key=key)
            self._rounds[facts["slots"], key] = made
        round = self._rounds[facts["slots"], key]
        operands = operands_of(round, shared, of_clients)
        own, at, first = np.asarray(operands.clients.position), facts["round"], facts["first"]
        if first is None:
            local, known = own // self._nodes, own % self._nodes == self.number
        else:
            local, known = own - first, (own >= first) & (own < first + self.data.num_clients)
        cohort = Cohort(self.data, np.where(known, local, 0), at, rng.root(0), work=work)
        if not known.all() or (cohort.sizes != np.asarray(operands.clients.size)).any():
            raise ValueError(
                f"Expected the clients of node {self.number}, with as many examples as the server knows, got others: use the "
                "same dataset at the server and at all nodes."
            )
        return round, operands, cohort

    def _folder_of(self, facts: Mapping[str, Any]) -> Path:
        """Returns where the node stores what the clients of a run keep, because runs begin again at round 1."""
        name = facts["run"]
        if name and not name.isalnum():
            raise ValueError(f"Expected a name of letters and digits for a run, got {name!r}: use the same version of fedsim.")
        return self._folder / name

    def _memories_after(self, rounds: int, round: DividedRound, facts: Mapping[str, Any]) -> ClientRows | None:
        """Returns what the clients keep after so many rounds: after the last one whose answer has reached the server.

        The states that the server may go back to stay on the disk: those of its checkpoints, and all later ones.
        """
        if round.memory_shapes == ():
            return None
        like = FederatedState((), ClientRows.empty(round.memory_shapes, self.data.num_clients))
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._folder_of(facts), rows_identity(self._algorithm, self.data))
            if self._checkpoints.rounds():
                self._checkpoints.newest(like)  # It protects the rows that the others refer to.
        before = [version for version in facts["answered"] if version <= rounds]
        known = [version for version in self._checkpoints.rounds() if version in before]
        saved = [version for version in facts["saved"] if version <= rounds]
        kept = {max((version for version in known if version <= at), default=0) for at in (*saved, rounds)}
        kept |= {version for version in known if version >= max(saved, default=0)}
        if before[-1:] != known[-1:]:
            raise _missing(self._folder_of(facts) / f"{before[-1]}")
        if self._checkpoints.rounds():
            self._checkpoints.keep_only(kept)
        if not known:
            return like.clients
        if self._memories is None or self._memories[0] != known[-1]:
            self._memories = known[-1], self._checkpoints.load(known[-1], like).clients
        return self._memories[1]


def _read_row(path: Path, like: Any) -> tuple[Any, bool]:
    """Returns what a client keeps, and whether it has kept something; zeros before its first update."""
    if path.name == "-1":
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like), False
    if not path.exists():
        raise _missing(path)
    leaves, facts = decode(path.read_bytes())
    return jax.tree.unflatten(jax.tree.structure(like), leaves), facts["seen"]


def _missing(path: Path) -> ValueError:
    return ValueError(
        f"Expected {path} with what clients keep between rounds, got none: restore the folder of the node, or start a new run."
    )


def versions() -> dict[str, str]:
    """Returns the versions on which the program of a round depends.

    >>> sorted(versions())
    ['fedsim', 'jax']
    """
    return {"fedsim": __version__, "jax": jax.__version__}


def leaves_of(operands: Operands) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of what all clients get, and of what is known of each client."""
    return jax.tree.leaves([getattr(operands, name) for name in _SHARED]), jax.tree.leaves(operands.clients)


def operands_of(round: DividedRound, shared: Sequence[Any], of_clients: Sequence[Any]) -> Operands:
    """Returns the inverse of `leaves_of`.

    Raises:
      ValueError: the leaves are not those of this round.
    """
    like = round.operand_shapes
    given = [jax.tree.structure([getattr(like, name) for name in _SHARED]), jax.tree.structure(like.clients)]
    expected, _ = leaves_of(like)
    if [(x.shape, str(x.dtype)) for x in shared] != [(x.shape, str(x.dtype)) for x in expected]:
        raise ValueError(
            "Expected what the server's round sends, got arrays of other shapes: use the same configuration, and the same "
            "versions of fedsim and JAX, at the server and at all nodes."
        )
    values = dict(zip(_SHARED, jax.tree.unflatten(given[0], shared), strict=True))
    return like._replace(**values, clients=jax.tree.unflatten(given[1], of_clients), rows=())


def serve(node: Node, path: str, *, watched: int | None = None, idle: float = math.inf) -> None:
    """Answers the messages that arrive at a Unix socket, one after another, until another process ends.

    Args:
      node: answers.
      path: of the socket.
      watched: the number of the other process; by default it is the one that started this one.
      idle: the most seconds without a message.
    """
    parent, since = os.getppid(), [time.monotonic()]

    def alive() -> bool:
        return os.getppid() == parent if watched is None else psutil.pid_exists(watched)

    def watch() -> None:
        while alive() and time.monotonic() - since[0] < idle:
            time.sleep(1)
        with contextlib.suppress(OSError):
            os.unlink(path)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    # The socket exists when it accepts connections, so it is moved to its path.
    with Listener(f"{path}.new", "AF_UNIX") as listener:
        os.rename(f"{path}.new", path)
        while True:
            with listener.accept() as connection:
                try:
                    _, blobs = _relay.receive(connection)
                    since[0] = math.inf  # It works, for however long.
                    _relay.send(connection, {}, {"reply": node.answer(blobs)})
                except (EOFError, ConnectionError):
                    pass  # Flower has ended the process of the app.
                since[0] = time.monotonic()


def main(arguments: Sequence[str]) -> int:
    """Runs a node: its arguments are a file with the configuration, the node's number, and the path of its socket."""
    parser = argparse.ArgumentParser("python -m fedsim.deployment")
    for name, kind in {"file": Path, "number": int, "socket": str}.items():
        parser.add_argument(name, type=kind)
    for name, kind, about in (
        ("folder", Path, "where what clients keep is stored"),
        ("data", str, "the node's own data"),
        ("watch", int, "the process that this one ends with; default: its parent"),
        ("idle", float, "the most seconds without a message; a node with masks ignores it"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=about, default=math.inf if name == "idle" else None)
    chosen = parser.parse_args(arguments)
    try:
        given = json.loads(chosen.file.read_text(encoding="utf-8"))
        if chosen.data and given["node_data"]:
            given["node_data"] = chosen.data
        elif chosen.data:
            given["config"]["data"] = chosen.data
        node = _built(given, chosen.number, chosen.folder or Path(given["folder"]) / str(chosen.number))
    except (ValueError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    # The other nodes have agreed on masks with the keys of this process, so no other process can take its place.
    serve(node, chosen.socket, watched=chosen.watch, idle=math.inf if node.has_masks else chosen.idle)
    return 0


def _built(given: Mapping[str, Any], number: int, folder: Path) -> Node:
    """Builds the node of a configuration. The parameters of the first round are the server's, so their file is not read."""
    config = dataclasses.replace(RunConfig.from_json(given["config"]), init_from=None, init_map=None, init_partly=False)
    settings, splits = Settings.from_json(given["settings"]), None
    if given["nodes"] <= number:
        raise ValueError(f"Expected a number of a node from 0 to {given['nodes'] - 1}, got {number}: give each node its own.")
    if given["node_data"]:
        own = load_own_data(config, given["node_data"], number)
        # The sampler is one of all clients, and need not fit these: a node needs to know only what it observes of them.
        observes = getattr(look_up("sampler", parse_call(config.sampler or "uniform")[0], SAMPLERS), "observes", ())
        norms = {"update_norms": True} if "update_norm" in observes else {}
        hyperparameters = {**config.hyperparameters, **norms}
        clients = min(config.clients, own.num_clients)
        config = dataclasses.replace(config, sampler=None, clients=clients, hyperparameters=hyperparameters)
        splits = FederatedSplits(own, own, describe(config.drawn_dataset))
    built = build_deployed(config, settings, splits=splits)
    return Node(built.algorithm, built.sampler, number, given["nodes"], folder, own=splits is not None)
