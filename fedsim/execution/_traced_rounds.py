"""`TracedRounds`: the traced rounds of an algorithm, for states and data of given shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.data import Cohort, FederatedData
from fedsim.execution._compile import settings_of_jax
from fedsim.execution._compiled_rounds import CompiledRounds
from fedsim.execution._device_round import CompileOptions
from fedsim.execution._placement import must_fit
from fedsim.rounds import (
    FederatedAlgorithm,
    Made,
    Numbers,
    RoundProgram,
    State,
    TraceOptions,
    form_of,
    kept_with,
    numbers_of,
    server_state,
    trace_round,
)


class TracedRounds:
    """The traced rounds of an algorithm, and the rounds compiled from them, for states and data of given shapes.

    Args:
      algorithm: the algorithm; its numbers are arguments of the rounds.
      numbers: these numbers, or others of the same shapes.
      state: a server's state of these shapes.
      data: a population of these shapes.
    """

    def __init__(self, algorithm: FederatedAlgorithm, numbers: Numbers, state: State, data: FederatedData) -> None:
        self.algorithm = algorithm
        self.fewer_lanes: dict[Any, int] = {}  # by mesh; set after a mesh ran out of memory with more
        self._shapes = jax.tree.map(_shape, (numbers, state, dict(data.columns)))
        self._traces: dict[TraceOptions, RoundProgram] = {}
        self._compiled: dict[CompileOptions, CompiledRounds] = {}
        self._fits: set[Any] = set()

    def trace(self, options: TraceOptions | None = None) -> RoundProgram:
        """Returns the traced round; with None, of any options."""
        if options is None:
            options = next(iter(self._traces), TraceOptions(slots=1, rows=1))
        if options not in self._traces:
            numbers, state, columns = self._shapes
            self._traces[options] = trace_round(self.algorithm, numbers, state, columns, options)
        return self._traces[options]

    def compiled(self, options: CompileOptions) -> CompiledRounds:
        """Returns the compiled rounds for some options. They are compiled when they are first called."""
        if options not in self._compiled:
            self._compiled[options] = CompiledRounds(self.trace(options.of_trace), options)
        return self._compiled[options]

    def check(self, cohort: Cohort, options: CompileOptions) -> None:
        """Raises ``ValueError`` if such a cohort cannot run on these devices, or not with a state of these shapes."""
        kind = cohort.slots, cohort.data.num_clients, options
        if kind in self._fits:
            return
        slots = options.layout.slots
        for call in self.trace().calls:
            if call.rows not in (None, cohort.data.num_clients):
                raise ValueError(
                    f"Expected the rows of clients.map_rows to have leaves [{cohort.data.num_clients}, ...], an entry for each "
                    f"client of the population, got {call.rows} entries: start with a state for this population."
                )
            if (fold := call.aggregator) is not None:
                if cohort.attack is not None:
                    fold = cohort.attack.wrap_aggregator(fold, jnp.zeros(slots, bool))
                fold.check(call.arrived, cohort.slots)
                must_fit(fold, jax.eval_shape(lambda fold=fold, call=call: fold.zero(call.arrived, slots)), slots, options.mesh)
        self._fits.add(kind)


class AlgorithmTraces:
    """The traced rounds of an algorithm, by the shapes of states and data.

    Args:
      algorithm: the algorithm; its numbers may be replaced.

    Attributes:
      needs_values: whether the algorithm's code needs the value of a number, so that numbers cannot be arguments.
    """

    def __init__(self, algorithm: FederatedAlgorithm) -> None:
        self.algorithm = algorithm
        self.needs_values = False
        self._by_shapes: dict[Any, TracedRounds] = {}

    def of(self, numbers: Numbers, state: State, data: FederatedData) -> TracedRounds:
        """Returns the traced rounds for such numbers, states and data."""
        columns = tuple((name, column.shape[1:], column.dtype) for name, column in data.columns.items())
        shapes = form_of((numbers, state)), columns, settings_of_jax()
        if shapes not in self._by_shapes:
            self._by_shapes[shapes] = TracedRounds(self.algorithm, numbers, state, data)
        return self._by_shapes[shapes]


def traced_rounds(
    algorithm: FederatedAlgorithm, state: State, data: FederatedData, options: TraceOptions | None = None
) -> tuple[TracedRounds, Numbers]:
    """Traces a round of an algorithm, unless it has been traced; returns its traced rounds, and the numbers to run them with.

    Every algorithm object is traced. Algorithms that differ only in their numbers (see `fedsim.rounds.numbers_of`) give the
    same text, and share executables. If the algorithm's code needs the value of a number, all of its numbers are constants of
    the text.

    Args:
      algorithm: the algorithm to run.
      state: a state, of arrays or ``jax.ShapeDtypeStruct``, of which the server's is read.
      data: the population.
      options: what the trace depends on, if the round is to run; None if any trace will do.

    Returns:
      The `TracedRounds`, whose ``trace()`` is the `fedsim.rounds.RoundProgram`, and the numbers, none if they are constants.

    The edges of a histogram's bins are computed by NumPy, which needs the values of its numbers:

    >>> import numpy as np, fedsim
    >>> data = FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> traced, numbers = traced_rounds(algorithm, algorithm.init(jax.random.key(0)), data)
    >>> [call.name for call in traced.trace().calls], numbers
    (['update'], {})
    """
    kept, state = kept_with(algorithm), server_state(state)
    if "traces" not in kept:
        kept["traces"] = AlgorithmTraces(algorithm), numbers_of(algorithm)
    own, numbers = kept["traces"]
    if not own.needs_values:
        traced = own.of(numbers, state, data)
        try:
            traced.trace(options)
            return traced, numbers
        except Exception:  # JAX has no common class for errors of code that needs the value of a number.
            if not numbers:
                raise
    # An error of the algorithm itself is raised again here, with values instead of tracers.
    constant = AlgorithmTraces(algorithm)
    traced = constant.of({}, state, data)
    traced.trace(options)
    own.needs_values, kept["traces"] = True, (constant, {})
    return traced, {}


def arguments_of(algorithm: FederatedAlgorithm) -> Numbers:
    """Returns the numbers that are arguments of an algorithm's rounds; none if they were traced with their values.

    >>> import fedsim, optax
    >>> model = fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedProx(
    ...     model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), mu=0.5)
    >>> arguments_of(algorithm)
    {'mu': 0.5}
    """
    return kept_with(algorithm)["traces"][1] if "traces" in kept_with(algorithm) else numbers_of(algorithm)


def share_programs(
    algorithms: Sequence[FederatedAlgorithm], make: Callable[..., Any], numbers: Sequence[Mapping[str, Any]]
) -> None:
    """Lets algorithms that one function makes from different numbers use the same programs, whose arguments are the numbers.

    The numbers may be inside other objects, such as the learning rate of `optax.sgd`. If the code of ``make`` or of an
    algorithm needs the value of a number, every algorithm gets its own programs, see `traced_rounds`.

    Args:
      algorithms: the algorithms ``make(**numbers[i])``.
      make: a function of traced numbers, too.
      numbers: floats and JAX arrays by name, for each algorithm.

    >>> import fedsim, optax
    >>> def make(rate):
    ...     model, batches = fedsim.models.digits_logistic(), fedsim.Batches(size=20)
    ...     return fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(rate), batches=batches)
    >>> algorithms = [make(0.1), make(0.2)]
    >>> share_programs(algorithms, make, [{"rate": 0.1}, {"rate": 0.2}])
    >>> [arguments_of(algorithm) for algorithm in algorithms]
    [{'numbers': {'rate': 0.1}}, {'numbers': {'rate': 0.2}}]
    """
    shared = AlgorithmTraces(Made(make))
    for algorithm, own in zip(algorithms, numbers, strict=True):
        kept_with(algorithm)["traces"] = shared, {"numbers": dict(own)}


def _shape(x: Any) -> Any:
    """Returns the shape and dtype of a leaf; Python numbers, whose dtypes are weak, stay what they are."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x
