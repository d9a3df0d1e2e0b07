"""`Algorithm`: two pure functions, `init` and `apply`, on a frozen record of hyperparameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax

from fedsim import checks
from fedsim.aggregators import Aggregator, Mean
from fedsim.compressors import Compressor
from fedsim.data import Batch, Batches, Cohort, FederatedData
from fedsim.execution import Auto, Client, ClientUpdate, Execution, RoundInfo, Turnout, remember, watch_dropped
from fedsim.model import Model

State = Any
Shared = Any
ClientState = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an algorithm promises beyond the contract; who tests algorithms asks for no more.

    Attributes:
      minimizes: its server's parameters go to the minimizer of the clients' mean loss, where clients are alike in size and
        their losses are quadratics.
      quadratic: hyperparameters with which it does so to two digits within 400 rounds.
      ordered: its answer depends on the order in which a client's examples come.
      aggregators: any aggregator of updates may stand in its `aggregator`, robust ones and compressing ones, too.

    >>> Algorithm.capabilities.minimizes
    True
    """

    minimizes: bool = True
    quadratic: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ordered: bool = True
    aggregators: bool = True


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Algorithm:
    """A federated algorithm: subclass it as ``@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)``.

    Either write the parts of a round, `client_init`, `client_step`, `client_final` and `server_update` (and `broadcast`,
    if clients do not get the whole state), and any executor runs them compiled; or override `apply` with a loop in plain
    Python: ``for client_id, dataset, key in cohort: ...``. All hooks are pure.

    Attributes:
      capabilities: what it promises beyond this contract; a class says so, not an object.
      batches: how a client cuts its examples into batches, and how many steps it takes.
      aggregator: how updates become one.
      execution: how a cohort is run. It changes the speed and never the answer.
      downlink: a compressor of the parameters that the server sends, ``shared.params`` (of all floats, where `broadcast` gives
        nothing of that name); None: clients get them as they are. These are parameters and not a change of them: what leaves
        many out (top-k, also with error feedback) is not for them.
      averaging: decay in [0, 1) of an exponential moving average of the server's parameters over the rounds: ``state.params``,
        which is evaluated, and from which clients' own are made where these are evaluated, is then the average, while
        ``state.server.params`` goes on as ever. It starts from the first round's (as optax.ema, debiased). 0 is the last
        round's, None: there is no average.
      nonfinite: ``"drop"`` leaves an update that holds a NaN or an infinity out of the round, counts it in the info and warns
        once (no round waits for that: the warning comes with a later call); ``"raise"`` raises ``FloatingPointError``, and
        waits for every round to see whether it must.

    Guarantees:
      - `apply` does not change its arguments, and its answer depends on them alone.
      - An empty client contributes nothing; a round in which nothing arrives returns the state as it was.
      - A non-finite update never reaches the aggregator.

    A federated count of examples, which is not about neural networks at all:

    >>> import jax.numpy as jnp, numpy as np
    >>> @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    ... class MeanOfX(Algorithm):
    ...     def init(self, key): return jnp.zeros(())
    ...     def client_init(self, shared, client): return jnp.zeros(())
    ...     def client_step(self, shared, state, batch): return state + jnp.sum(batch.examples["x"], where=batch.mask)
    ...     def client_final(self, shared, state, client):
    ...         size = client.num_examples.astype(jnp.float32)
    ...         return ClientUpdate(state / size, size)
    ...     def server_update(self, state, update): return update
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
    nonfinite: Literal["drop", "raise"] = "drop"

    @property
    def preview(self) -> Batches | None:
        """How each client reads its examples once before it trains (`client_preview`); None, the default: it does not."""
        return None

    @property
    def phases(self) -> tuple[Algorithm, ...]:
        """The passes over the cohort that make a round, each with its own hooks on the same server state; the last is self."""
        return (self,)

    def __post_init__(self) -> None:
        checks.one_of("drop", "raise", nonfinite=self.nonfinite)
        checks.number(least=0, below=1, or_none=True, averaging=self.averaging, remedy="None is no average")
        checks.instance(Execution, "fedsim.Jit()", execution=self.execution)
        checks.instance(Aggregator, "Mean()", aggregator=self.aggregator)
        checks.instance(Compressor, "Eden(bits=2)", or_none=True, downlink=self.downlink)
        checks.instance(Batches, "fedsim.Batches(size=20)", batches=self.batches)
        for field in dataclasses.fields(self):
            if field.name == "aggregator" and callable(field.default_factory) and not self.capabilities.aggregators:
                self._must_fold_by(field.default_factory())

    def _must_fold_by(self, own: Aggregator) -> None:
        """Raises ``ValueError`` if what folds updates is of another class than its ``own``, whatever is around it."""
        if type(self.aggregator.innermost) is not type(own.innermost):
            raise ValueError(
                f"{type(self).__name__} folds updates by {own}, got aggregator={self.aggregator}: give that, or one that has "
                "it inside (inner=)."
            )

    def init(self, key: jax.Array) -> State:
        """The state before the first round: a pytree of arrays holding exactly what the next round needs."""
        raise NotImplementedError(f"{type(self).__name__} must define init(key).")

    def broadcast(self, state: State) -> Shared:
        """What the server sends to every client; by default its whole state."""
        return state

    def client_memory(self, shared: Shared) -> Any:
        """What a client that was never seen starts with; what it keeps later is ``ClientUpdate.memory``, and it gets it back as
        ``client.memory``. A pytree of numeric arrays of fixed shapes; by default clients keep nothing."""
        return ()

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        """A client's state before its first step: a pytree of arrays of fixed shapes."""
        raise NotImplementedError(f"{type(self).__name__} must define client_init, or override apply.")

    def client_preview(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        """Looks at one batch of `preview` before the first step."""
        raise NotImplementedError(f"{type(self).__name__} must define client_preview, or leave preview None.")

    def client_begin(self, shared: Shared, state: ClientState, client: Client) -> ClientState:
        """After the preview, if there is one, and before the first step."""
        return state

    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        """One step on one batch; what ``batch.mask`` marks False must not count."""
        raise NotImplementedError(f"{type(self).__name__} must define client_step, or override apply.")

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        """What the client sends back after its last step."""
        raise NotImplementedError(f"{type(self).__name__} must define client_final, or override apply.")

    def client_sent(self, result: ClientUpdate, client: Client, arrived: Any) -> Any:
        """What the client keeps, now that this ``arrived`` of its update: ``result.update`` as it was, or clipped, compressed.

        By default ``result.memory``; who keeps what goes by the update has this instead.
        """
        return result.memory

    def server_update(self, state: State, update: Any) -> State:
        """The state after the round, from the state before it and the aggregated update."""
        raise NotImplementedError(f"{type(self).__name__} must define server_update, or override apply.")

    def server_round(self, state: State, update: Any, turnout: Turnout) -> State:
        """`server_update` for those who must know how many of the population came; by default that, without knowing."""
        return self.server_update(state, update)

    def check(self, data: FederatedData) -> None:
        """Raises ``ValueError`` if this algorithm cannot read ``data``; called once per population, before compiling.

        An algorithm that has a ``model`` asks it; others override this if there is anything to check.
        """
        self.batches.check(data.sizes)
        model = getattr(self, "model", None)
        if isinstance(model, Model):
            model.check(data)

    def remember(self, state: State, data: FederatedData) -> State:
        """``state`` as it will be from the first round on: joined by what clients, the aggregator and the downlink keep.

        If they keep nothing, it is ``state`` itself; else a `fedsim.execution.Remembered`, whose ``server`` is ``state``.
        `apply` does this where it has not been done. An algorithm without `client_init`, whose `apply` is its own, has none of
        this.
        """
        if type(self).client_init is Algorithm.client_init:
            return state
        return remember(self, state, data)

    def apply(self, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """One round: broadcast, every client's steps, fold, server update."""
        state, info = self.execution.run_one(self, state, cohort)
        watch_dropped(self, info, [cohort], self.nonfinite)
        return state, info

    def apply_rounds(
        self, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        """Several rounds in one dispatch, which keeps the host out of the loop; the same answer as `apply` one by one.

        Args:
          state: the state before the first round.
          cohorts: one per round.
          max_rounds: calls with up to this many cohorts share one compiled program.

        Returns:
          The state after the last round, and infos stacked along a new first axis ``[rounds]``.
        """
        checks.whole(1, or_none=True, max_rounds=max_rounds)
        cohorts = list(cohorts)
        if not cohorts:
            raise ValueError("Expected at least one cohort, got none.")
        if type(self).apply is not Algorithm.apply:
            infos = []
            for cohort in cohorts:
                state, info = self.apply(state, cohort)
                infos.append(info)
            return state, jax.tree.map(lambda *rows: jax.numpy.stack(rows), *infos)
        state, stacked = self.execution.run(self, state, cohorts, max_rounds=max_rounds)
        watch_dropped(self, stacked, cohorts, self.nonfinite)
        return state, stacked
