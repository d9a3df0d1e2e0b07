"""Evaluation of each client's own parameters on its own examples."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.algorithm import map_clients
from fedsim.data import Batch, Batches, ClientRows, Cohort, FederatedData
from fedsim.evaluation._evaluate import Evaluation, evaluation_of
from fedsim.evaluation._recalibration import batches_of_pass, check_recalibration, recalibrated
from fedsim.evaluation._statistics import Statistics, add_batch, on_host, statistics, sum_forms, zeros
from fedsim.execution import Execution, check_alike, check_population, num_remembered, row_shapes
from fedsim.model import Model, ModelParts, Params, keeps_parts, scope_of
from fedsim.primitives import without_mesh_of_context
from fedsim.rounds import (
    Client,
    FederatedState,
    Shared,
    first_memory,
    kept_with,
    parts_of,
    server_state,
    with_memory_of,
    with_params,
)

_CHUNK_BYTES_ON_CPU = 2**27
_CHUNK_BYTES = 2**30
_LARGEST_CHUNK = 1024


@without_mesh_of_context()
def evaluate_personalized(
    algorithm: Any,
    state: Any,
    train: FederatedData,
    test: FederatedData,
    *,
    fine_tune: Any = None,
    recalibrate: bool = False,
    seed: int | jax.Array = 0,
    execution: Execution | None = None,
    batch_size: int | None = None,
    rows: np.ndarray | None = None,
) -> Evaluation:
    """Evaluates each client of ``test`` with its own parameters.

    A client's own parameters are:

    - ``algorithm.personal_params(shared, client)`` if the algorithm has this method. It may use the client's memory and its
      training examples, which are those of the client with the same name in ``train``.
    - Without this method, the parameters that the server sends: ``algorithm.downloaded(shared, client)`` if the algorithm has
      this method, and otherwise ``shared.params``.
    - If ``fine_tune`` is given, the result of its local steps on the training examples, which start from the parameters above
      (``fine_tune.train(shared, client).params``).

    With ``recalibrate``, running statistics are then replaced by those of the client's training examples (AdaBN, Li et al.
    2016), with the network in training mode and unchanged parameters.

    The server's parameters are ``state.params``, which are averaged over rounds if the algorithm has ``averaging``. A client
    that is not in ``train`` gets the parameters of a client without memory and training examples, in most algorithms the
    server's model. If no client of ``test`` is in ``train``, a warning says so. Clients run in chunks, by `fedsim.map_clients`.

    Args:
      algorithm: the algorithm that trained ``state``; it has a ``model``.
      state: a result of `Algorithm.apply` on ``train``, or of ``init``. It is not changed.
      train: the population that ``state`` was trained on.
      test: the examples to evaluate on.
      fine_tune: `FedAvg` or a subclass, with its batches and client optimizer. If it has the same class as the algorithm, its
        local steps are those of the client's next round. If it has another class, they are those of a first round that starts
        from the parameters above.
      recalibrate: whether each client computes the running statistics of its own training examples: the mean over the batches
        of one pass, weighted by their numbers of examples. The batches have the size of those of ``fine_tune``, or otherwise of
        the algorithm. A client without any keeps the statistics.
      seed: the seed of shuffling and dropout.
      execution: how clients are run; default: the algorithm's execution.
      batch_size: test examples per step. It affects speed and memory only. The default depends on the clients' sizes.
      rows: ``int [train.num_clients, 2]``, which of its training examples each client has, see `fedsim.Cohort`; default: all.
        For clients whose examples arrive, see `fedsim.samplers.Arriving.rows`.

    Returns:
      An `Evaluation`, whose ``overall`` weights all examples equally. See `Evaluation.over_clients` for the distribution over
      clients.

    Raises:
      ValueError: the algorithm has no parameters per client, ``fine_tune`` has no local steps outside of a round, the state
        belongs to another population or algorithm, the data does not fit the model, labels of ``test`` are hidden, or some of
        ``train`` and one of the algorithms needs all, ``fine_tune`` cannot train on ``train`` as in a round, an argument has
        the wrong type, or a metric does not return one entry per example; with ``recalibrate``, the model has no running
        statistics, has some that are no averages over batches, or does not leave out the padding of partial batches.

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
    checks.truth(recalibrate=recalibrate)
    _check_algorithms(algorithm, fine_tune, recalibrate)
    parts = parts_of(state)
    if parts.clients != () and (known := num_remembered(parts.clients)) != train.num_clients:
        raise ValueError(
            f"The state was trained on a population of {known} clients, and train has {train.num_clients}. Pass the population "
            "that the state was trained on."
        )
    _check_state(algorithm, parts)
    for data in (train, test):
        data.check_dtypes()
    unlabelled = all(each.capabilities.unlabelled for each in (algorithm, fine_tune or algorithm))
    algorithm.model.check(train, unlabelled=unlabelled)
    algorithm.model.check(test)
    work = _work(algorithm, fine_tune, recalibrate, batch_size or _suitable_batch_size(test.sizes))
    rows = None if rows is None else np.asarray(rows)
    if rows is not None and rows.shape != (train.num_clients, 2):
        raise ValueError(
            f"Expected rows [{train.num_clients}, 2], two positions for each client of train, got {list(rows.shape)}."
        )
    sizes = train.sizes if rows is None else rows[:, 1] - rows[:, 0]
    if fine_tune is not None:
        check_population(fine_tune, train)
        if rows is not None:  # Otherwise, these sizes have been checked.
            fine_tune.check_padding(sizes)
    if recalibrate:
        check_recalibration(algorithm.model)
        algorithm.model.check_padding(batches_of_pass(work.batches), sizes)
    shared = algorithm.broadcast(_evaluated(parts))
    first, root = work.first_round(shared), rng.stream(rng.root(seed), "personal")
    clients = np.flatnonzero(test.sizes)
    in_train = _positions(test, train, clients)
    if len(clients) and np.all(in_train < 0):
        warnings.warn(
            f"None of the {len(clients)} clients of test, the first of which is {test.client_ids[clients[0]]!r}, is in train, "
            f"whose first is {train.client_ids[0]!r}, so each gets the parameters of a client without memory and training "
            "examples. If they are the same clients, give them the same ids.",
            stacklevel=3,  # past the decorator
        )
    slots = max(1, min(_clients_at_once(algorithm, shared), len(clients), train.num_clients))
    run = functools.partial(map_clients, batches=work.batches, execution=execution or algorithm.execution)
    absent: Any = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(algorithm.model.init_whole, root))
    if np.any(in_train < 0):
        anyone = Cohort(train, np.zeros(1, np.int32), 0, root)
        absent = jax.tree.map(lambda x: x[0], run(work.absent_params, (shared, first, parts.parts), anyone))
    forms = _sum_forms(algorithm.model, test)
    none = zeros(forms)
    sums = on_host(jax.tree.map(lambda total: np.zeros((test.num_clients, *total.shape), total.dtype), none))
    for start in range(0, len(clients), slots):
        # All chunks have the same number of slots, so that they share programs.
        chunk, at = clients[start : start + slots], in_train[start : start + slots]
        present = np.flatnonzero(at >= 0)
        memories = _memories(parts, algorithm, shared, at[present], slots)
        cohort = Cohort(train, at[present], 0, root, slots, rows=None if rows is None else rows[at[present]])
        params = run(work.params, (shared, first, parts.parts, *memories), cohort)
        index = np.full(slots, -1, np.int32)
        index[present] = np.arange(len(present))
        found = run(work.statistics, (params, index, absent, none), Cohort(test, chunk, 0, rng.root(0), slots))
        for of_clients, of_chunk in zip(jax.tree.leaves(sums), jax.tree.leaves(on_host(found)), strict=True):
            of_clients[chunk] = of_chunk[: len(chunk)]
    return evaluation_of({name: sums[name] for name in algorithm.model.metrics})


def _sum_forms(model: Model, data: FederatedData) -> Statistics:
    """`sum_forms`, traced once for data of the same shapes and dtypes."""
    kept = kept_with(model).setdefault("sum forms", {})
    form = tuple((name, tuple(column.shape[1:]), str(column.dtype)) for name, column in data.columns.items())
    if form not in kept:
        kept[form] = sum_forms(model, jax.eval_shape(model.init_whole, jax.random.key(0)), data.columns)
    return kept[form]


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """The computations of a client: its own parameters, and their evaluation."""

    algorithm: Any
    fine_tune: Any
    recalibrate: bool
    batch_size: int

    def __post_init__(self) -> None:
        # Each access to a method makes a new function object, and `map_clients` compiles every new one.
        for name in ("params", "absent_params", "statistics"):
            object.__setattr__(self, name, getattr(self, name))

    @property
    def batches(self) -> Batches:
        return (self.fine_tune or self.algorithm).batches

    @property
    def _continues(self) -> bool:
        """Whether fine-tuning is the client's next round of the same algorithm."""
        return type(self.fine_tune) is type(self.algorithm)

    def first_round(self, shared: Shared) -> Any:
        """Returns what the server sends in a first round of ``fine_tune``, if its class is not that of the algorithm."""
        if self.fine_tune is None or self._continues:
            return ()
        sent = _first_sent(self.fine_tune, rng.root(0))
        return sent._replace(round=getattr(shared, "round", sent.round))

    def params(self, arguments: tuple[Shared, Any, Any, Any, jax.Array], client: Client) -> Params:
        """Returns a client's own parameters, with all parts of the model.

        Args:
          arguments: what the server sends, `first_round`, the parts of the model at the server, memories ``[slots, ...]``, and
            whether each exists, ``bool [slots]``.
          client: the client of the training data.
        """
        shared, first, parts, memories, seen = arguments
        start = first_memory(self.algorithm, shared, parts)
        kept = tree.select(seen[client.slot], jax.tree.map(lambda rows: rows[client.slot], memories), start)
        memory, parts = with_memory_of(parts, kept)
        whole = self._params(shared, first, dataclasses.replace(client, memory=memory, parts=parts))
        if not self.recalibrate:
            return whole
        return recalibrated(self.algorithm.model, whole, client, batches_of_pass(self.batches))

    def absent_params(self, arguments: tuple[Shared, Any, Any], client: Client) -> Params:
        """Returns the parameters of a client without memory and training examples."""
        shared, first, parts = arguments
        none = jnp.zeros_like(client.num_examples)
        memory, parts = with_memory_of(parts, first_memory(self.algorithm, shared, parts))
        client = dataclasses.replace(client, num_examples=none, num_steps=none, memory=memory, parts=parts)
        return self._params(shared, first, client)

    def _params(self, shared: Shared, first: Any, client: Client) -> Params:
        def whole(params: Params, parts: Any) -> Params:
            return parts.join(params) if isinstance(parts, ModelParts) else params

        with scope_of(client.parts):
            if self.fine_tune is not None and self._continues:
                local = self.fine_tune.train(shared, client)
                return whole(local.params, local.parts)
            start = getattr(self.algorithm, "personal_params", None) or getattr(self.algorithm, "downloaded", None)
            params = start(shared, client) if start else shared.params
            if self.fine_tune is None:
                return whole(params, client.parts)
            if isinstance(client.parts, ModelParts):
                params, own = client.parts.of_model(client.parts.join(params))
                client = dataclasses.replace(client, parts=own)
            sent = first._replace(params=params)
            local = self.fine_tune.train(sent, dataclasses.replace(client, memory=self.fine_tune.client_memory(sent)))
            return whole(local.params, local.parts)

    def statistics(self, arguments: tuple[Params, jax.Array, Params, Statistics], client: Client) -> Statistics:
        """Returns the statistics of a client's metrics, summed over its test examples.

        Args:
          arguments: parameters ``[slots, ...]``, the index of each client's parameters, ``int32 [slots]``, the parameters of
            clients whose index is -1, and zero sums.
          client: the client of the test data.
        """
        params, index, absent, none = arguments
        model, at = self.algorithm.model, index[client.slot]
        own = tree.select(at >= 0, jax.tree.map(lambda x: x[jnp.maximum(at, 0)], params), absent)

        def add(sums: Statistics, batch: Batch) -> Statistics:
            return add_batch(sums, statistics(model, own, batch.examples), batch.mask)

        return client.for_each_batch(Batches(size=self.batch_size, shuffle=False), add, none)


def _work(algorithm: Any, *settings: Any) -> _Work:
    """Returns the same object for the same arguments, because `map_clients` compiles every new function."""
    kept = kept_with(algorithm).setdefault("personal", {})
    if settings not in kept:
        kept[settings] = _Work(algorithm, *settings)
    return kept[settings]


def _check_algorithms(algorithm: Any, fine_tune: Any, recalibrate: bool) -> None:
    """Raises ``ValueError`` unless the algorithms define each client's own parameters."""
    for name, value in {"algorithm": algorithm, "fine_tune": fine_tune}.items():
        trains = all(hasattr(value, part) for part in ("model", "client_update", "broadcast")) and not isinstance(value, type)
        if not trains and not (name == "fine_tune" and value is None):
            raise ValueError(
                f"Expected {name} to be an algorithm that trains a model, such as FedAvg(...), got {name}={value!r}."
            )
    has_own = hasattr(algorithm, "personal_params") or recalibrate or keeps_parts(algorithm.model)
    if fine_tune is None and not has_own:
        raise ValueError(
            f"{type(algorithm).__name__} has no personal_params, so every client's model is the server's. Use fedsim.evaluate, "
            "or set fine_tune to an algorithm such as FedAvg, whose local steps train a model for each client."
        )
    if fine_tune is None:
        return
    if not callable(getattr(fine_tune, "train", None)):
        raise ValueError(
            "Expected fine_tune to be an algorithm with train, whose clients train one model, such as FedAvg, got "
            f"{type(fine_tune).__name__}."
        )
    key = rng.root(0)
    start = getattr(jax.eval_shape(functools.partial(_first_sent, fine_tune), key), "params", None)
    whole = jax.tree.map(jnp.shape, start) == jax.tree.map(jnp.shape, jax.eval_shape(algorithm.model.init, key))
    if not whole and type(fine_tune) is not type(algorithm):
        raise ValueError(
            "Expected fine_tune to be an algorithm whose clients start from one whole model, such as FedAvg, or of the same "
            f"class as the algorithm, {type(algorithm).__name__}, got {type(fine_tune).__name__}."
        )


def _check_state(algorithm: Any, parts: FederatedState) -> None:
    """Raises ``ValueError`` unless the fields of the state that are used here have the algorithm's names and shapes."""
    kept = kept_with(algorithm)
    if "first forms" not in kept:  # Cached, because this takes longer than the evaluation of a few clients.
        try:
            first = server_state(jax.eval_shape(algorithm.init, jax.random.key(0)))
        except jax.errors.ConcretizationTypeError:  # The algorithm's init cannot be traced.
            return
        expected = jax.eval_shape(algorithm.broadcast, first)
        model_parts = jax.eval_shape(algorithm.model_parts, jax.random.key(0))
        own = jax.eval_shape(functools.partial(first_memory, algorithm), expected, model_parts)
        kept["first forms"] = type(first), expected, own
    (kind, expected, own), state = kept["first forms"], _evaluated(parts)
    sent, row = jax.eval_shape(algorithm.broadcast, state) if isinstance(state, kind) else (), own
    if parts.clients != () and jax.tree.leaves(own):
        row = row_shapes(parts.clients)[0]
    for given, wanted in ((sent, expected), (row, own)):
        check_alike(algorithm, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), (given, wanted)))


def _first_sent(algorithm: Any, key: jax.Array) -> Any:
    """Returns what the server sends in an algorithm's first round."""
    return algorithm.broadcast(server_state(algorithm.init(key)))


def _evaluated(parts: FederatedState) -> Any:
    """Returns the server's state, in which an average over rounds, if there is one, replaces the parameters.

    If the parameters are computed from models of the clients, the average is none of theirs.
    """
    is_computed = isinstance(getattr(type(parts.server), "params", None), property)
    return parts.server if parts.average == () or is_computed else with_params(parts.server, parts.average.params)


def _suitable_batch_size(sizes: np.ndarray) -> int:
    """Returns the power of two up to 256 with the lowest cost, where a batch costs as much as its rows and eight more."""
    candidates = [2**i for i in range(9)]
    return min(candidates, key=lambda size: int((-(-sizes // size)).sum()) * (size + 8))


def _positions(test: FederatedData, train: FederatedData, clients: np.ndarray) -> np.ndarray:
    """Returns the positions in ``train`` of these clients of ``test``, and -1 for clients that are not in ``train``."""
    if test.client_ids is train.client_ids:
        return clients
    names = [test.client_ids[i] for i in clients.tolist()]
    return np.array([train.index(name) if name in train else -1 for name in names], np.int64)


def _clients_at_once(algorithm: Any, shared: Any) -> int:
    """Returns the number of clients whose memories and parameters fit in a chunk."""
    row = jax.eval_shape(algorithm.client_memory, shared), jax.eval_shape(algorithm.model.init_whole, jax.random.key(0))
    chunk_bytes = _CHUNK_BYTES_ON_CPU if jax.default_backend() == "cpu" else _CHUNK_BYTES
    return max(1, min(_LARGEST_CHUNK, 8 * chunk_bytes // tree.num_bits(row)))


def _memories(parts: FederatedState, algorithm: Any, shared: Any, at: np.ndarray, slots: int) -> tuple[Any, Any]:
    """Returns the memories of the clients at these positions, ``[slots, ...]``, and which of them exist, ``bool [slots]``."""
    clients, own = parts.clients, jax.eval_shape(functools.partial(first_memory, algorithm), shared, parts.parts)
    if clients == () or not jax.tree.leaves(own):
        return jax.tree.map(lambda x: np.zeros((slots, *x.shape), x.dtype), own), np.zeros(slots, bool)
    if isinstance(clients, ClientRows):
        rows, seen = clients.gather_from_owners(at, slots)
    else:
        filled = np.zeros(slots, np.int64)
        filled[: len(at)] = at
        rows, seen = jax.tree.map(lambda leaf: leaf[filled], tuple(clients))
    return rows[0], seen & (np.arange(slots) < len(at))
