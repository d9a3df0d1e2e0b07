"""Evaluation of every client's own parameters on its own examples: short programs for the same executors as rounds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.aggregators import Aggregator, Mean
from fedsim.data import Batch, Batches, ClientRows, Cohort, FederatedData
from fedsim.execution._contract import Client, ClientTable, ClientUpdate, Remembered, RoundInfo, Turnout
from fedsim.execution._evaluate import Evaluation, evaluation_of
from fedsim.execution._execution import Execution
from fedsim.execution._memory import must_be_alike, split, turns, with_params
from fedsim.metrics import Mean as MeanOf
from fedsim.model import Params

_CHUNK_BYTES_ON_CPU = 2**27
_CHUNK_BYTES = 2**30
_LARGEST_CHUNK = 1024


def evaluate_personalized(
    algorithm: Any,
    state: Any,
    train: FederatedData,
    test: FederatedData,
    *,
    fine_tune: Any = None,
    seed: int | jax.Array = 0,
    execution: Execution | None = None,
    batch_size: int | None = None,
) -> Evaluation:
    """Evaluates every client of ``test`` with parameters of its own, on its own examples.

    These are, for the client of the same name in ``train``:

    - of an algorithm with a method ``personal_params(shared, memory) -> params``: what that makes of what the client keeps
      (or would start with, if it was never seen). If the algorithm has a `preview`, the client first takes that look at its
      training examples, and no step, and what it would keep then counts;
    - else those that ``broadcast`` sends, ``shared.params``;
    - and from there, with ``fine_tune``, those after the client's part of a round of this algorithm, with all its hooks: its
      look at the training examples, if it has a `preview`, and its local steps on them.

    The server's parameters are ``state.params``, as everywhere: of an algorithm with ``averaging``, their average. A client
    that is not in ``train`` has what one that was never seen starts with: the server's model. Clients are run in chunks,
    compiled, by the algorithm's execution (or another), which does not change the answer.

    Args:
      algorithm: what trained ``state``; it has a ``model``.
      state: of `Algorithm.apply` on ``train``, or of ``init``. It is not changed.
      train: the population that ``state`` remembers.
      test: the examples to evaluate on, with the features that the model reads.
      fine_tune: an algorithm whose clients' state has ``params``: `FedAvg` and its kin, with the batches and the client
        optimizer to fine-tune with. One of the algorithm's own class gets what the server sends and what the client keeps, as
        in the next round; one of another class is in a first round of its own that starts at the parameters above (a part of
        the algorithm, as its own ``fine_tune`` is, gets what the server sends there). Default: ``algorithm.fine_tune``, if it
        has one.
      seed: of the fine-tuning's shuffling and dropout.
      execution: default: that of the algorithm.
      batch_size: test examples per step: speed and memory only. Default: what suits the clients' sizes.

    Returns:
      Its ``overall`` weighs all examples alike; see `Evaluation.over_clients` for the distribution over clients.

    Raises:
      ValueError: there is nothing personal about the algorithm, the state is one of another population or another
        algorithm, the data is not what the model reads, an argument is of the wrong kind.

    >>> import optax, fedsim
    >>> data = FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 8, 8, 1], np.uint8), "y": np.repeat(np.int32([0, 1]), 3)}, sizes=[3, 3])
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5), batches=Batches(size=3))
    >>> state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), Cohort.of(data, ["0", "1"]))
    >>> fedsim.evaluate(algorithm.model, state.params, data).overall["accuracy"]
    0.5
    >>> fedsim.evaluate_personalized(algorithm, state, data, data, fine_tune=algorithm).overall["accuracy"]
    1.0
    """
    checks.whole(1, or_none=True, batch_size=batch_size)
    checks.instance(FederatedData, "data.train", train=train, test=test)
    checks.instance(Execution, "fedsim.Jit()", or_none=True, execution=execution)
    _must_train(algorithm=algorithm)
    fine_tune = getattr(algorithm, "fine_tune", None) if fine_tune is None else fine_tune
    if fine_tune is None and not hasattr(algorithm, "personal_params"):
        raise ValueError(
            f"{type(algorithm).__name__} has no personal_params, so every client's model is the server's: use fedsim.evaluate, "
            "or give fine_tune, an algorithm such as FedAvg whose local steps make it personal."
        )
    if fine_tune is not None:
        _must_train(fine_tune=fine_tune)
    parts = split(state)
    if parts.clients != () and (known := _num_clients(parts.clients)) != train.num_clients:
        raise ValueError(
            f"The state remembers a population of {known} clients, and train has {train.num_clients}: give the population that "
            "it was trained on."
        )
    _check_state(algorithm, parts)
    execution = execution or algorithm.execution
    programs = _programs(algorithm, fine_tune, batch_size or _suitable_batch_size(test.sizes))
    shared = algorithm.broadcast(_evaluated(parts))
    who = np.flatnonzero(test.sizes)
    in_train = _positions(test, train, who)
    slots = min(_clients_at_once(algorithm, shared), max(1, len(who)), train.num_clients)
    key = rng.stream(rng.root(seed), "personal")
    sums = {name: np.zeros([2, test.num_clients], np.float32) for name in algorithm.model.metrics}
    for start in range(0, len(who), slots):
        chunk, at = who[start : start + slots], in_train[start : start + slots]
        in_both, at = chunk[at >= 0], at[at >= 0]
        told = Told(shared, _filled(at, slots), *_kept(parts.clients, algorithm, shared, at, slots))
        for program, work in ((programs.look, np.zeros(len(at), np.float32)), (programs.tune, None)):
            if program:
                _, info = execution.run_one(program, told, Cohort(train, at, 0, key, slots, work))
                told = told._replace(rows=program.left(info, shared), seen=np.arange(slots) < len(at))
        told = told._replace(clients=_filled(in_both, slots))
        _, info = execution.run_one(programs.examine, told, Cohort(test, chunk, 0, rng.root(0), slots))
        for name, of_clients in sums.items():
            of_clients[:, chunk] = np.asarray(info.clients[name]).T[:, : len(chunk)]
    return evaluation_of({name: MeanOf(total, weight) for name, (total, weight) in sums.items()})


class Told(NamedTuple):
    """What the programs below get for the server's state.

    Attributes:
      shared: what the algorithm sends.
      clients: positions of the clients that have a row, ``int32 [slots]``, -1 where there is none.
      rows: what each of them keeps, or its parameters, leaves ``[slots, ...]``.
      seen: who was ever written, ``bool [slots]``.
      tuning: what the fine-tuning's server sends, which `_Tune` adds.
    """

    shared: Any
    clients: Any
    rows: Any
    seen: Any
    tuning: Any = ()

    def row(self, client: Client, otherwise: Any) -> Any:
        """The client's row, or what one without has."""
        at = jnp.argmax(self.clients == client.position)
        there = (self.clients[at] == client.position) & self.seen[at]
        return tree.select(there, jax.tree.map(lambda rows: rows[at], self.rows), otherwise)


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A round in which nothing is aggregated: what it finds out is in its info."""

    algorithm: Any
    batches: Batches
    preview: Batches | None = None
    aggregator: Aggregator = dataclasses.field(default_factory=Mean)
    nonfinite: Literal["drop", "raise"] = "drop"
    downlink: Any = None
    averaging: float | None = None

    @property
    def phases(self) -> tuple[Any, ...]:
        return (self,)

    def check(self, data: FederatedData) -> None:
        self.batches.check(data.sizes)
        self.algorithm.model.check(data)

    def broadcast(self, state: Told) -> Told:
        return state

    def client_memory(self, shared: Told) -> Any:
        return ()

    def client_preview(self, shared: Told, state: Any, batch: Batch) -> Any:
        return state

    def client_begin(self, shared: Told, state: Any, client: Client) -> Any:
        return state

    def client_step(self, shared: Told, state: Any, batch: Batch) -> Any:
        return state

    def client_sent(self, result: ClientUpdate, client: Client, arrived: Any) -> Any:
        return result.memory

    def server_update(self, state: Told, update: Any) -> Told:
        return state

    def server_round(self, state: Told, update: Any, turnout: Turnout) -> Told:
        return state

    def params(self, shared: Any, memory: Any) -> Params:
        """Where a client starts that keeps this."""
        own = getattr(self.algorithm, "personal_params", None)
        return own(shared, memory) if own else shared.params

    def remembering(self, shared: Told, client: Client) -> Client:
        """The client as in a round of the algorithm."""
        return client._replace(memory=shared.row(client, self.algorithm.client_memory(shared.shared)))

    def leave(self, rows: Any) -> ClientUpdate:
        """What a client leaves behind for the next program."""
        return ClientUpdate((), jnp.float32(0), {f"leaf {i}": leaf for i, leaf in enumerate(jax.tree.leaves(rows))})

    def left(self, info: RoundInfo, shared: Any) -> Any:
        """That of all clients, leaves ``[slots, ...]``."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(self.like, shared))
        return jax.tree.unflatten(structure, [info.clients[f"leaf {i}"] for i in range(len(leaves))])

    def like(self, shared: Any) -> Any:
        """What one client leaves behind, for its structure."""
        return self.algorithm.client_memory(shared)


@dataclasses.dataclass(frozen=True, eq=False)
class _Look(_Program):
    """Every client's look at its training examples, without a step: what it would keep then."""

    def client_init(self, shared: Told, client: Client) -> Any:
        return self.algorithm.client_init(shared.shared, self.remembering(shared, client))

    def client_preview(self, shared: Told, state: Any, batch: Batch) -> Any:
        return self.algorithm.client_preview(shared.shared, state, batch)

    def client_begin(self, shared: Told, state: Any, client: Client) -> Any:
        return self.algorithm.client_begin(shared.shared, state, self.remembering(shared, client))

    def client_final(self, shared: Told, state: Any, client: Client) -> ClientUpdate:
        client = self.remembering(shared, client)
        result = self.algorithm.client_final(shared.shared, state, client)
        return self.leave(self.algorithm.client_sent(result, client, result.update))


class _Tuning(NamedTuple):
    """What the client gets for the server's parameters, and its state."""

    start: Params
    state: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Tune(_Program):
    """Every client's part of a round of the fine-tuning, by its own hooks: the parameters that it ends with."""

    fine_tune: Any = None

    def broadcast(self, state: Told) -> Told:
        if self._same() or getattr(self.fine_tune, "whole", None) is self.algorithm:  # or a part of it
            return state._replace(tuning=state.shared)
        sent = _first_sent(self.fine_tune, jax.random.key(0))
        return state._replace(tuning=sent._replace(round=getattr(state.shared, "round", sent.round)))

    def client_init(self, shared: Told, client: Client) -> _Tuning:
        client = self.remembering(shared, client)
        start = shared.shared.params if self._same() else self.params(shared.shared, client.memory)
        sent = shared.tuning._replace(params=start)
        state = self.fine_tune.client_init(sent, self._tuned(sent, client))
        if not hasattr(state, "params"):
            raise ValueError(
                "Expected fine_tune to be an algorithm whose clients' state has params, such as FedAvg, got "
                f"{type(self.fine_tune).__name__}."
            )
        return _Tuning(start, state)

    def client_preview(self, shared: Told, state: _Tuning, batch: Batch) -> _Tuning:
        sent = shared.tuning._replace(params=state.start)
        return state._replace(state=self.fine_tune.client_preview(sent, state.state, batch))

    def client_begin(self, shared: Told, state: _Tuning, client: Client) -> _Tuning:
        sent = shared.tuning._replace(params=state.start)
        client = self._tuned(sent, self.remembering(shared, client))
        return state._replace(state=self.fine_tune.client_begin(sent, state.state, client))

    def client_step(self, shared: Told, state: _Tuning, batch: Batch) -> _Tuning:
        sent = shared.tuning._replace(params=state.start)
        return state._replace(state=self.fine_tune.client_step(sent, state.state, batch))

    def client_final(self, shared: Told, state: _Tuning, client: Client) -> ClientUpdate:
        return self.leave(state.state.params)

    def like(self, shared: Any) -> Params:
        return self.algorithm.model.init(jax.random.key(0))

    def _same(self) -> bool:
        return type(self.fine_tune) is type(self.algorithm)

    def _tuned(self, sent: Any, client: Client) -> Client:
        return client if self._same() else client._replace(memory=self.fine_tune.client_memory(sent))


@dataclasses.dataclass(frozen=True, eq=False)
class _Examine(_Program):
    """Every client's test: its metrics, summed over its examples."""

    tuned: bool = False

    def client_init(self, shared: Told, client: Client) -> tuple[Params, dict[str, MeanOf]]:
        start = self.algorithm.client_memory(shared.shared)
        if self.tuned:
            params = shared.row(client, self.params(shared.shared, start))
        else:
            params = self.params(shared.shared, shared.row(client, start))
        return params, {name: MeanOf(jnp.float32(0), jnp.float32(0)) for name in self.algorithm.model.metrics}

    def client_step(self, shared: Told, state: tuple[Params, dict[str, MeanOf]], batch: Batch) -> Any:
        params, so_far = state
        outputs = self.algorithm.model.apply_for_eval(params, batch.examples)

        def total(values: Any) -> jax.Array:
            return jnp.sum(jnp.where(batch.mask, jnp.asarray(values, jnp.float32), 0.0))

        metrics = self.algorithm.model.metrics
        found = {name: MeanOf(*map(total, metric(batch.examples, outputs))) for name, metric in metrics.items()}
        return params, {name: so_far[name].merge(found[name]) for name in so_far}

    def client_final(self, shared: Told, state: tuple[Params, dict[str, MeanOf]], client: Client) -> ClientUpdate:
        return ClientUpdate((), jnp.float32(0), {name: jnp.stack([*mean]) for name, mean in state[1].items()})


class _Programs(NamedTuple):
    """What is run, one after another; None: it is not needed."""

    look: _Look | None
    tune: _Tune | None
    examine: _Examine


def _programs(algorithm: Any, fine_tune: Any, batch_size: int) -> _Programs:
    """Kept with the algorithm, since what is compiled is kept with them."""
    kept = vars(algorithm).setdefault("_personal_programs", {})
    if (fine_tune, batch_size) not in kept:
        # A client that fine-tunes by the algorithm itself takes its look then.
        same = type(fine_tune) is type(algorithm)
        if fine_tune and not same:
            _check_start(algorithm, fine_tune)
        looks = hasattr(algorithm, "personal_params") and algorithm.preview and not same
        look = _Look(algorithm, Batches(size=1), algorithm.preview) if looks else None
        tune = _Tune(algorithm, fine_tune.batches, fine_tune.preview, fine_tune=fine_tune) if fine_tune else None
        examine = _Examine(algorithm, Batches(size=batch_size, shuffle=False), tuned=tune is not None)
        kept[fine_tune, batch_size] = _Programs(look, tune, examine)
    return kept[fine_tune, batch_size]


def _must_train(**algorithms: Any) -> None:
    """Raises ``ValueError`` for the first of these arguments that is no algorithm with a model and clients."""
    for name, value in algorithms.items():
        if not all(hasattr(value, part) for part in ("model", "client_init", "broadcast")) or isinstance(value, type):
            raise ValueError(
                f"Expected {name} to be an algorithm that trains a model, such as FedAvg(...), got {name}={value!r}."
            )


def _check_state(algorithm: Any, parts: Remembered) -> None:
    """Raises ``ValueError`` unless what is looked at here has the names and shapes of the algorithm's own."""
    kept = vars(algorithm)
    if "_first_forms" not in kept:  # which takes longer than to evaluate a few clients
        try:
            first = jax.eval_shape(algorithm.init, jax.random.key(0))
        except jax.errors.ConcretizationTypeError:  # Its init is not for compilers.
            return
        expected = jax.eval_shape(algorithm.broadcast, first)
        kept["_first_forms"] = type(first), expected, jax.eval_shape(algorithm.client_memory, expected)
    (kind, expected, own), state = kept["_first_forms"], _evaluated(parts)
    sent, row = jax.eval_shape(algorithm.broadcast, state) if isinstance(state, kind) else (), own
    if parts.clients != () and jax.tree.leaves(own):
        row = _own_row(algorithm, parts.clients)
    for there, here in ((sent, expected), (row, own)):
        must_be_alike(algorithm, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), (there, here)))


def _own_row(algorithm: Any, clients: ClientRows | ClientTable) -> Any:
    """The shapes of what the algorithm itself keeps for a client, beside its aggregator and its other phases."""
    if isinstance(clients, ClientRows):
        like = clients.store.like
    else:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), clients.rows)
    try:
        return turns(algorithm)[-1].sees(Remembered((), ClientTable(like, ()))).clients.rows[0]
    except (IndexError, TypeError, ValueError):  # kept by another number of phases
        return ()


def _first_sent(fine_tune: Any, key: jax.Array) -> Any:
    """What clients get in its first round."""
    return fine_tune.broadcast(fine_tune.init(key))


def _check_start(algorithm: Any, fine_tune: Any) -> None:
    key = jax.random.key(0)
    start = getattr(jax.eval_shape(functools.partial(_first_sent, fine_tune), key), "params", None)
    if jax.tree.map(jnp.shape, start) != jax.tree.map(jnp.shape, jax.eval_shape(algorithm.model.init, key)):
        raise ValueError(
            f"Expected fine_tune to be an algorithm whose clients start from one whole model, such as FedAvg, or of the class "
            f"of the algorithm itself, {type(algorithm).__name__}, got {type(fine_tune).__name__}."
        )


def _evaluated(parts: Remembered) -> Any:
    """The server's state, with the average of its parameters in their place, if there is one."""
    if parts.average == ():
        return parts.server
    return with_params(parts.server, parts.params)


def _suitable_batch_size(sizes: np.ndarray) -> int:
    """A power of two up to 256 with little padding: starting a batch is taken to cost as much as eight examples."""
    candidates = [2**i for i in range(9)]
    return min(candidates, key=lambda size: int((-(-sizes // size)).sum()) * (size + 8))


def _positions(test: FederatedData, train: FederatedData, who: np.ndarray) -> np.ndarray:
    """Where in ``train`` these clients of ``test`` are, -1 for those who are not."""
    if test.client_ids is train.client_ids:
        return who
    names = [test.client_ids[i] for i in who.tolist()]
    return np.array([train.index(name) if name in train else -1 for name in names], np.int64)


def _clients_at_once(algorithm: Any, shared: Any) -> int:
    """As many as have room for what they keep and for their parameters."""
    row = jax.eval_shape(algorithm.client_memory, shared), jax.eval_shape(algorithm.model.init, jax.random.key(0))
    room = _CHUNK_BYTES_ON_CPU if jax.default_backend() == "cpu" else _CHUNK_BYTES
    return max(1, min(_LARGEST_CHUNK, 8 * room // tree.num_bits(row)))


def _filled(positions: np.ndarray, slots: int) -> np.ndarray:
    filled = np.full(slots, -1, np.int32)
    filled[: len(positions)] = positions
    return filled


def _num_clients(clients: ClientRows | ClientTable) -> int:
    return len(clients.index if isinstance(clients, ClientRows) else clients.seen)


def _kept(clients: Any, algorithm: Any, shared: Any, at: np.ndarray, slots: int) -> tuple[Any, Any]:
    """What the algorithm keeps for the clients at these positions, leaves ``[slots, ...]``, and for whom, ``bool [slots]``."""
    own = jax.eval_shape(algorithm.client_memory, shared)
    if clients == () or not jax.tree.leaves(own):
        return jax.tree.map(lambda x: np.zeros((slots, *x.shape), x.dtype), own), np.zeros(slots, bool)
    if isinstance(clients, ClientRows):
        rows, seen = clients.gather(at, slots)
    else:
        rows, seen = jax.tree.map(lambda leaf: leaf[np.maximum(_filled(at, slots), 0)], tuple(clients))
    table = turns(algorithm)[-1].sees(Remembered((), ClientTable(rows, seen))).clients
    return table.rows[0], table.seen & (np.arange(slots) < len(at))
