"""`Algorithm`: two pure functions, `init` and `apply`, on a frozen record of hyperparameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from fedsim import checks
from fedsim.aggregators import Aggregator, DistributedMechanism, GaussianMechanism, LocallyNoised, Mean, SecureMean, Wrapper
from fedsim.compressors import Compressor
from fedsim.data import Batches, Cohort, FederatedData
from fedsim.execution import Auto, Execution, cut_rows, remembered, watch_problems, without_arrivals
from fedsim.model import PARTS_IN_WORDS, Model, ModelParts
from fedsim.rounds import Client, Clients, ClientUpdate, FederatedState, RoundInfo, Staleness

State = Any
Shared = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an algorithm promises beyond the contract of `Algorithm`. Tests of all algorithms rely on it.

    Attributes:
      minimizes: the server's parameters converge to the minimizer of the clients' mean loss if clients have equally many
        examples and quadratic losses.
      quadratic: hyperparameters for which this takes at most 400 rounds to two digits.
      ordered: the result depends on the order of a client's examples.
      aggregators: every aggregator of updates may be its `aggregator`, also robust and compressing ones.
      scalable: an update that is multiplied by a number moves the server by as many times less or more, so that a staleness
        weight may scale it. Updates are not scalable if they are no step, such as a mean, if their parts enter the server's
        state in different ways, or if clients also store them. A class that overrides `client_update`,
        `server_update`, `broadcast` or `round` must declare it again.
      repeatable: a client may have a weight above 1 in a round, as one that `fedsim.samplers.ClusteredSampling` draws twice. It
        may not if its memory changes by its weight, `fedsim.rounds.Client.arrival_weight`, times the difference to the new
        value, which would then go beyond that value.
      model_parts: clients may change other parts of the model than the parameters that the algorithm sees, such as running
        statistics, or parameters that each client keeps, see `fedsim.Model.with_parts`. Frozen parts are no such parts.
        Clients train from what the server sent and from `Client.parts`, as `LocalTraining.run` does, and return the parts in
        `fedsim.ClientUpdate`.
      refused_parts: why the algorithm nevertheless takes no models with some parts, by the names of `fedsim.model.ModelParts`.
      microbatches: clients compute gradients by `LocalTraining` alone, of losses that are means over examples, so
        ``batches.microbatch`` may divide a batch. Other algorithms refuse it.
      reads_on: clients go on to read their examples where they stopped in an earlier round, in one order of all of them, so
        examples must not arrive during the run, see `fedsim.samplers.Arriving`.
      needed: fields that no option of a command line can give. While one of them is None, the default, the algorithm is another
        one, so `fedsim.configuration` refuses it, unless a derived class has a value for the field.
      unlabelled: it also learns from examples whose label is hidden, which is -1, see `fedsim.partitioners.hide_labels`. Other
        algorithms refuse them.
      accumulates: the server's state, or what clients keep, has sums over rounds in the dtypes of the parameters. Parameters in
        half precision are refused then, because such sums would lose small terms.

    >>> Algorithm.capabilities.minimizes
    True
    """

    minimizes: bool = True
    quadratic: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ordered: bool = True
    aggregators: bool = True
    scalable: bool = False
    repeatable: bool = True
    reads_on: bool = False
    needed: tuple[str, ...] = ()
    unlabelled: bool = False
    model_parts: bool = False
    microbatches: bool = False
    accumulates: bool = False
    refused_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Algorithm:
    """A federated algorithm. Subclass it as ``@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)``.

    A typical algorithm defines three methods: `init`, `client_update` (one client's round) and `server_update`. Clients
    receive what `broadcast` returns. If a round needs its clients more than once, override `round`. These methods are pure
    functions and are compiled. For what cannot be compiled, override `apply` with a Python loop: ``for client_id, dataset, key
    in cohort: ...``.

    Fields that are floats are arguments of the compiled round, so algorithms that differ only in these share one program. If
    the code needs the value of a float, as in ``if self.mu:``, all floats are constants of the program. Code that does not fail
    on a traced number, such as ``isinstance(self.mu, float)`` or ``f"{self.mu}"``, sees a JAX tracer in its place. Global
    variables that methods use are read when an algorithm first runs.

    Attributes:
      capabilities: what the class promises beyond this contract.
      batches: how a client cuts its examples into batches, and how many steps it takes.
      aggregator: how updates are aggregated.
      execution: how a cohort is run. It affects the speed and never the answer.
      downlink: a compressor of the floats in ``shared.params``, or of all floats if `broadcast` returns something without
        ``params``. None sends them uncompressed. These are parameters and not a difference of parameters, so
        compressors that leave many coordinates out (top-k, for example, also with error feedback) do not suit.
      averaging: decay in [0, 1) of an exponential moving average of the server's parameters over the rounds, as ``optax.ema``
        with debiasing computes it. The average is ``state.params``, which is evaluated and from which clients' own parameters
        are computed in evaluation; training continues with ``state.server.params``. It needs parameters of at least
        ``float32``. None computes no average.
      staleness: lets clients start from what the server sent in earlier rounds; None if all start from this round's.
      nonfinite: ``"drop"`` excludes updates with a NaN or an infinity from the round, counts them in the info, and warns
        once, at a later call. Where clients add noise, such a client sends its noise alone. ``"raise"`` raises
        ``FloatingPointError``; it waits for every round.
      update_norms: whether the round's info has the ``update_norm`` of every client, the Euclidean norm of its update before
        compression and clipping and without auxiliary data, for the metrics and for samplers that it steers.

    Guarantees:
      - `apply` does not change its arguments, and its result depends on nothing else.
      - A client without examples contributes nothing. A round in which no update arrives returns the state unchanged,
        unless the aggregator acts nevertheless, as one that adds noise to every round (`Aggregator.acts_on`).
      - An update that is not finite never reaches the aggregator.

    Raises:
      ValueError: an attribute is not of the kind that is described, or ``batches`` has a ``microbatch`` and the subclass does
        not declare ``microbatches``.

    As an example, the mean of all clients' numbers:

    >>> import jax.numpy as jnp, numpy as np
    >>> @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    ... class MeanOfX(Algorithm):
    ...     def init(self, key): return jnp.zeros(())
    ...     def client_update(self, shared, client):
    ...         def add(total, batch): return total + jnp.sum(batch.examples["x"], where=batch.mask)
    ...         total = client.for_each_batch(self.batches, add, jnp.zeros(()))
    ...         size = client.num_examples.astype(jnp.float32)
    ...         return ClientUpdate(total / jnp.maximum(size, 1), weight=size)
    ...     def server_update(self, state, update, info): return update
    >>> data = FederatedData.from_arrays({"x": np.array([1.0, 2.0, 6.0], np.float32)}, sizes=[2, 1])
    >>> algorithm = MeanOfX(batches=Batches(size=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), Cohort.of(data, ["0", "1"]))
    >>> float(state), info.clients["num_examples"].tolist()
    (3.0, [2, 1])
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    batches: Batches
    aggregator: Aggregator = dataclasses.field(default_factory=Mean)
    execution: Execution = dataclasses.field(default_factory=Auto)
    downlink: Any = None
    averaging: float | None = None
    staleness: Staleness | None = None
    nonfinite: Literal["drop", "raise"] = "drop"
    update_norms: bool = False

    def __post_init__(self) -> None:
        checks.one_of("drop", "raise", nonfinite=self.nonfinite)
        checks.truth(update_norms=self.update_norms)
        checks.number(least=0, below=1, or_none=True, averaging=self.averaging, remedy="None computes no average")
        checks.instance(Execution, "fedsim.Jit()", execution=self.execution)
        checks.instance(Aggregator, "Mean()", aggregator=self.aggregator)
        checks.instance(Compressor, "Eden(bits=2)", or_none=True, downlink=self.downlink)
        checks.instance(Staleness, "fedsim.Staleness(bound=10)", or_none=True, staleness=self.staleness)
        checks.instance(Batches, "fedsim.Batches(size=20)", batches=self.batches)
        if self.batches.microbatch is not None:
            self._check_microbatches()
        for field in dataclasses.fields(self):
            if field.name == "aggregator" and callable(field.default_factory) and not self.capabilities.aggregators:
                self._check_aggregator(field.default_factory())

    def _check_microbatches(self) -> None:
        """Raises ``ValueError`` if gradients cannot be summed over microbatches."""
        what = "" if self.capabilities.microbatches else type(self).__name__
        if {"statistics", "own_statistics"} & set(jax.tree.leaves(getattr(getattr(self, "model", None), "roles", None))):
            what = "a model with running statistics, which are those of whole batches"
        if what:
            raise ValueError(
                f"Expected batches without microbatches for {what}, got microbatch={self.batches.microbatch}: leave it out; a "
                "smaller batch size also takes less memory."
            )

    @property
    def not_differentiable(self) -> str:
        """What makes its derivatives zero or wrong, such as "rounds", for `fedsim.differentiable`; "" if they are right."""
        return ""

    @property
    def preview(self) -> str:
        """What clients compute by the network in training mode in a pass over all of their examples, besides training, such as
        "the loss"; "" if there is no such pass.
        """
        return ""

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is copied and pickled. Compiled programs are left out."""
        return {name: value for name, value in vars(self).items() if name != "_execution"}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls.init, "adds_model_parts"):  # It may be that of a mixin.
            cls.init = _with_model_parts(cls.init)  # type: ignore[method-assign, assignment]

    def model_parts(self, key: jax.Array) -> ModelParts | tuple[()]:
        """Returns the parts of the model that are not among the algorithm's parameters, before the first round; () if there
        are none. They are drawn from the same key as the parameters.
        """
        parts = getattr(getattr(self, "model", None), "init_parts", None)
        return () if parts is None else parts(key)

    def _check_aggregator(self, own: Aggregator) -> None:
        """Raises ``ValueError`` if the innermost aggregator is of another class than ``own``'s."""
        if type(self.aggregator.innermost) is not type(own.innermost):
            raise ValueError(
                f"{type(self).__name__} needs the aggregator {own}, got aggregator={self.aggregator}: use it, or a wrapper "
                "with it as inner."
            )

    def init(self, key: jax.Array) -> State:
        """Returns the server's state before the first round: a pytree of arrays that holds what the next round needs."""
        raise NotImplementedError(f"{type(self).__name__} must define init(key).")

    def broadcast(self, state: State) -> Shared:
        """Returns what the server sends to every client. By default it is the state."""
        return state

    def client_memory(self, shared: Shared) -> Any:
        """Returns the ``client.memory`` of a client's first round. By default it is empty.

        It is a pytree of numeric arrays of fixed shapes. Later, the memory is the ``ClientUpdate.memory`` of the client's last
        round.
        """
        return ()

    def client_update(self, shared: Shared, client: Client) -> ClientUpdate:
        """Computes one client's round, in plain JAX. To loop over batches, call `Client.for_each_batch`."""
        raise NotImplementedError(f"{type(self).__name__} must define client_update, or override round or apply.")

    def server_update(self, state: State, update: Any, info: RoundInfo) -> State:
        """Returns the server's state after the round.

        Args:
          state: before the round.
          update: the aggregate of the clients' updates.
          info: the weights of the clients, and which clients participated; see `RoundInfo`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define server_update, or override round or apply.")

    def round(self, state: State, clients: Clients) -> tuple[State, Any]:
        """Runs one round. Override it to call `Clients.aggregate` or `Clients.map` more than once.

        Returns:
          The server's state after the round, and the round's info: that of the last ``clients.aggregate``. A round that only
          calls ``clients.map`` may return any pytree of arrays as its info.
        """
        shared = self.broadcast(state)
        update, info = clients.aggregate(self.client_update, shared)
        return self.server_update(state, update, info), info

    def check(self, data: FederatedData) -> None:
        """Raises ``ValueError`` if the algorithm cannot read ``data``. It is called once per population, before compilation."""
        self.batches.check(data.sizes)
        self._check_weights(data)
        model = getattr(self, "model", None)
        if isinstance(model, Model):
            model.check(data, unlabelled=self.capabilities.unlabelled)
            model.check_trainable()
            self._check_parts(model)
            self.check_padding(data.sizes)
        else:
            data.check_range(data.columns)

    def check_padding(self, sizes: np.ndarray) -> None:
        """Raises ``ValueError`` if clients with so many examples, ``int [clients]``, would normalize by padding.

        See `fedsim.Model.check_padding`.
        """
        model = getattr(self, "model", None)
        if isinstance(model, Model):
            model.check_padding(self.batches, sizes)
            if self.preview:
                model.check_padding(self.batches.one_pass(), sizes, purpose=self.preview)

    def _check_weights(self, data: FederatedData) -> None:
        """Raises ``ValueError`` if clients are weighted by examples, and an aggregator that bounds weights does not fit."""
        mechanism = self.aggregator.innermost
        by_examples = getattr(self, "weighting", None) == "examples"
        if isinstance(mechanism, SecureMean) and by_examples and mechanism.max_weight < (usual := float(np.median(data.sizes))):
            raise ValueError(
                f"Expected SecureMean with max_weight of at least {usual:g}, the median number of examples of a client, got "
                f"{mechanism.max_weight:g}: most clients would have equal weights. Give a larger one, or weighting='uniform'."
            )
        outer = self.aggregator
        while isinstance(outer, Wrapper) and by_examples:
            if isinstance(outer, LocallyNoised):
                raise ValueError(
                    f"Expected weighting='uniform' with LocallyNoised, got weighting='examples' in {type(self).__name__}: each "
                    "client would send its number of examples without noise. Choose uniform weights."
                )
            outer = outer.inner
        if isinstance(mechanism, GaussianMechanism) and mechanism.largest_weight is None and by_examples:
            raise ValueError(
                f"Expected weighting='uniform' with GaussianMechanism, got weighting='examples' in {type(self).__name__}: with "
                "weights that have no bound, one client could change the sum by any amount. Choose uniform weights, or give "
                "the mechanism a largest_weight, such as 100 examples, and a denominator for such weights."
            )
        if isinstance(mechanism, DistributedMechanism) and by_examples:
            raise ValueError(
                f"Expected weighting='uniform' with DistributedMechanism, got weighting='examples' in {type(self).__name__}: "
                "clients add their noise before the sum, so all have the same weight. Choose uniform weights."
            )

    def _check_parts(self, model: Model) -> None:
        """Raises ``ValueError`` if the algorithm takes no models with the parts that this one has."""
        for role, reason in self.capabilities.refused_parts.items():
            if role in model.part_names:
                raise ValueError(f"{type(self).__name__} takes no model with {PARTS_IN_WORDS[role]}: {reason}.")
        if model.has_changing_parts and not self.capabilities.model_parts:
            raise ValueError(
                f"{type(self).__name__} takes models whose other parts are frozen, got one with {model.parts_in_words}: "
                "use FedAvg, for example, or a model without them, such as one with GroupNorm."
            )

    @property
    def has_memory(self) -> bool:
        """Whether clients, the aggregator or the downlink may keep a memory between rounds."""
        if getattr(getattr(self, "model", None), "init_parts", None) is not None:
            return True
        own_memory = any(getattr(type(self), name) is not getattr(Algorithm, name) for name in ("client_memory", "round"))
        cls = type(self.aggregator)
        aggregator_memory = cls.init is not Aggregator.init or cls.client_memory is not Aggregator.client_memory
        kept = self.downlink, self.averaging, self.staleness
        return own_memory or aggregator_memory or any(value is not None for value in kept)

    def with_memory(self, state: State, data: FederatedData) -> State:
        """Adds to a server's state the memories of clients, aggregators and the downlink.

        `apply` does this itself if it has not been done.

        Returns:
          A `fedsim.rounds.FederatedState` whose ``server`` is ``state``; ``state`` itself if nothing is kept, or if the
          algorithm overrides `apply`.
        """
        if type(self).apply is not Algorithm.apply or not (self.has_memory or isinstance(state, FederatedState)):
            return state
        return remembered(self, state, data)

    def apply(self, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """Runs one round: broadcast, the clients' work, aggregation and the server's update."""
        state, info = self.execution.run_one(self, state, cohort)
        watch_problems(self, info, self.execution.took_part([cohort]))
        return state, info

    def apply_rounds(
        self, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        """Runs several rounds in one dispatch. The result is the same as that of separate calls of `apply`.

        Args:
          state: the state before the first round.
          cohorts: one per round.
          max_rounds: all calls with at most this many cohorts share one compiled program.

        Returns:
          The state after the last round, and the infos, stacked along a new first axis ``[rounds]``.

        Raises:
          ValueError: there is no cohort, or the algorithm refuses one; see `check`. Or the algorithm overrides `apply`, and a
            cohort has an attack, which `apply` would not run.
        """
        checks.whole(1, or_none=True, max_rounds=max_rounds)
        cohorts = list(cohorts)
        if not cohorts:
            raise ValueError("Expected at least one cohort, got none.")
        if type(self).apply is not Algorithm.apply:
            if attacks := [cohort.attack for cohort in cohorts if cohort.attack is not None]:
                raise ValueError(
                    f"Expected cohorts without an attack, because {type(self).__name__} overrides apply and runs the clients "
                    f"itself, got {attacks[0]}: give a sampler without Attacked (no --attack)."
                )
            infos = []
            for cohort in cohorts:
                state, info = self.apply(state, cohort)
                infos.append(info)
            return state, jax.tree.map(lambda *rows: jax.numpy.stack(rows), *infos)
        state, stacked = self.execution.run(self, state, cohorts, max_rounds=max_rounds)
        watch_problems(self, stacked, self.execution.took_part(cohorts))
        return state, stacked


def _with_model_parts(init: Callable[[Any, jax.Array], State]) -> Callable[[Any, jax.Array], State]:
    """Adds the parts of the model to the state that ``init`` returns, which the algorithm itself does not see."""

    @functools.wraps(init)
    def with_parts(self: Any, key: jax.Array) -> State:
        state = init(self, key)
        # A subclass that calls ``super().init`` gets the server's state alone.
        parts = self.model_parts(key) if type(self).init is with_parts else ()
        return state if parts == () else FederatedState(state, parts=parts)

    with_parts.adds_model_parts = True  # type: ignore[attr-defined]
    return with_parts


def map_clients(
    work: Callable[[Shared, Client], Any],
    shared: Shared,
    cohort: Cohort,
    *,
    batches: Batches | None = None,
    execution: Execution | None = None,
) -> Any:
    """Returns each client's ``work(shared, client)``, outside of any algorithm: leaves ``[slots, ...]`` in cohort order.

    ``work`` is traced once per function object. To trace it only once in several calls, pass the same object. A later change
    of what it reads besides its arguments then has no effect. Each access to a method, such as ``model.work``, makes a new
    object.

    Args:
      work: one client's work, in plain JAX; see `Client.for_each_batch`.
      shared: what all clients get, a pytree of arrays.
      cohort: the clients.
      batches: what ``client.num_steps`` counts; default: one example at a time.
      execution: how clients are run; default `Auto`.

    Raises:
      ValueError: clients of the cohort have started in earlier rounds; there is no model of these rounds here. Or ``shared`` is
        a whole `FederatedState`.

    >>> import jax.numpy as jnp, numpy as np
    >>> data = FederatedData.from_arrays({"x": np.array([1.0, 2.0, 6.0], np.float32)}, sizes=[2, 1])
    >>> def largest(shared, client):
    ...     def step(so_far, batch): return jnp.maximum(so_far, jnp.max(batch.examples["x"]))
    ...     return client.for_each_batch(Batches(size=1), step, shared)
    >>> map_clients(largest, jnp.float32(1.5), Cohort.of(data, ["0", "1"])).tolist()
    [2.0, 6.0]
    """
    cohort = without_arrivals(cohort, "map_clients")
    if isinstance(shared, FederatedState):
        raise ValueError(
            "Expected what all clients get as shared in map_clients, got a FederatedState, which also has what clients keep: "
            "give state.params, or state.server."
        )
    algorithm = _map_of(_Same(work), batches or Batches(size=1, shuffle=False), execution or Auto())
    return cut_rows(algorithm.apply(shared, cohort)[1], cohort.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """Compares an object by identity: two equal methods may read an object that has changed, and some have no hash."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@functools.lru_cache(maxsize=32)
def _map_of(work: _Same, batches: Batches, execution: Execution) -> Algorithm:
    return _Map(work=work.value, batches=batches, execution=execution)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Map(Algorithm):
    """A round that maps ``work`` over its clients and changes nothing."""

    capabilities = Capabilities(microbatches=True)  # Whether they are summed is up to the work.

    work: Callable[[Shared, Client], Any]
    has_memory = False

    def round(self, state: Shared, clients: Clients) -> tuple[Shared, Any]:
        # Named like the call of a round, so that clients have the shuffle and keys of their round.
        return state, clients.map(self.work, state, name="update")
