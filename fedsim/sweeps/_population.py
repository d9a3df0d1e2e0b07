"""`population`: the same federation with many settings and seeds, in one compiled program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import numbers
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim.algorithm import Algorithm
from fedsim.configuration import How
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import Jit, arguments_of, joined, placed, report_problems, share_programs
from fedsim.experiment.driving import (
    DispatchedRounds,
    DispatchLength,
    Rounds,
    default_evaluation,
    evaluation_line,
    round_lines,
)
from fedsim.rounds import RoundInfo, parts_of
from fedsim.samplers import Sampler, check_fits, checked_cohort
from fedsim.sweeps._grid import Setting, listed_seeds, listed_settings, shown
from fedsim.sweeps._lockstep import run_groups
from fedsim.sweeps._ways import Job, chosen_way, ways

if TYPE_CHECKING:
    import pandas

# Fewer rounds per dispatch show progress more often; more rounds wait less often for the host.
_ROUNDS_PER_DISPATCH = 32

State = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """The result of `population`.

    Attributes:
      settings: the arguments of ``make_algorithm``, one mapping for each setting.
      seeds: the seeds.
      state: the states after the last round on the host, leaves ``[settings, seeds, ...]``.
      infos: the infos of all rounds on the host, leaves ``[settings, seeds, rounds, ...]``; see `fedsim.RoundInfo`.
      evaluation: the evaluation of the last states, ``[settings, seeds, ...]`` by name, with the names that ``metrics.jsonl``
        has: ``test_accuracy``, ``test_accuracy_clients_std`` and so on. It is empty without ``test_data``.
      how: how the members were run.

    >>> Population(settings=[{"mu": 0.1}], seeds=[0, 1], state=(), infos={}, evaluation={"test_loss": np.array([[3.0, 4.0]])},
    ...            how="vmap").axes
    {'state': ('setting', 'seed'), 'infos': ('setting', 'seed', 'round'), 'evaluation': ('setting', 'seed')}
    """

    settings: Sequence[Setting]
    seeds: Sequence[int]
    state: State
    infos: Any
    evaluation: Mapping[str, np.ndarray]
    how: How

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of the first axes of ``state``, ``infos`` and ``evaluation``."""
        return {"state": ("setting", "seed"), "infos": ("setting", "seed", "round"), "evaluation": ("setting", "seed")}

    def state_of(self, setting: int, seed: int) -> State:
        """Returns the state of one member, as a separate run returns it.

        Args:
          setting: the index of the setting.
          seed: the index of the seed.
        """
        return jax.tree.map(lambda x: x[setting, seed, ...], self.state)

    def to_pandas(self, *, by_round: bool = False) -> pandas.DataFrame:
        """Returns a table whose index has a level for each argument of ``make_algorithm`` and for the seed.

        Args:
          by_round: False for a row per setting and seed, with the evaluation of the last state and the training loss of the
            last round. True for a row per setting, seed and round, with what ``metrics.jsonl`` has for each round; ``round`` is
            the last level of the index and counts finished rounds.

        Raises:
          ImportError: pandas is not installed.

        >>> result = Population(settings=[{"mu": 0.1}], seeds=[0, 1], state=(), infos={"loss": np.array([[[9.0], [8.0]]])},
        ...                     evaluation={"test_loss": np.array([[3.0, 4.0]])}, how="vmap")
        >>> result.to_pandas().reset_index().to_dict("records")
        [{'mu': 0.1, 'seed': 0, 'loss': 9.0, 'test_loss': 3.0}, {'mu': 0.1, 'seed': 1, 'loss': 8.0, 'test_loss': 4.0}]
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError("to_pandas needs pandas: pip install 'fedsim-jax[run]'.") from error
        rows = []
        for i, j in itertools.product(range(len(self.settings)), range(len(self.seeds))):
            name = {**self.settings[i], "seed": self.seeds[j]}
            infos = jax.tree.map(lambda x, i=i, j=j: x[i, j], self.infos)
            leaves = jax.tree.leaves(infos)
            lines = round_lines(infos, 0, len(leaves[0]) if leaves else 0, 0.0) if leaves else []
            for line in lines:
                del line["seconds"]  # Members that run together have no time of their own.
            if by_round:
                rows += [name | line for line in lines]
            else:
                last = {key: value for key, value in (lines[-1] if lines else {}).items() if key == "loss"}
                scores = {key: values[i, j] for key, values in self.evaluation.items() if values.ndim == 2}
                rows.append(name | last | scores)
        levels = [*self.settings[0], "seed", *(["round"] if by_round else [])]
        return pandas.DataFrame(rows).set_index(levels)


class _Group(NamedTuple):
    """Settings that share programs: they differ only in numbers. ``settings`` are their indices."""

    settings: list[int]
    numbers: list[dict[str, Any]]
    constants: dict[str, Any]
    make: Callable[..., Algorithm]


def population(
    make_algorithm: Callable[..., Algorithm],
    settings: Mapping[str, Sequence[Any]] | Sequence[Setting],
    seeds: int | Sequence[int],
    *,
    sampler: Callable[[int], Sampler],
    rounds: int,
    test_data: FederatedData | None = None,
    how: How | None = None,
    progress: bool = True,
) -> Population:
    """Trains with every setting and every seed. The result equals that of separate runs, up to the order of sums.

    Settings whose values are floats are arguments of one compiled program, whatever the algorithm does with them: ``lambda
    rate: FedAvg(client_optimizer=optax.sgd(rate), ...)`` is compiled once for all rates. ``make_algorithm`` is called once for
    every setting, so that wrong values are found before the first round, and once with traced numbers.

    On two CPU cores, 8 members side by side took as long as 8 members one after another, and 32 took 1.4 to 1.6 times as long
    (logistic and dense models for EMNIST). So a CPU runs the members one after another, on all of its devices, and a GPU or TPU
    runs them side by side.

    Args:
      make_algorithm: returns the algorithm of a setting, ``make_algorithm(**setting)``. Create the model outside of it if you
        can. The algorithm's ``execution`` determines the devices.
      settings: one mapping per setting, all with the same names; or one mapping from names to sequences of values, of which all
        combinations are run. Values that are not floats, and names whose values are all integers, are constants of a program
        for each combination of them.
      seeds: the seeds; a number n means seeds 0 to n - 1.
      sampler: returns the sampler of a seed. All must have the same data, so seeds do not vary how the examples are divided
        among clients, as those of ``fedsim run --seeds`` do: call `population` once for each division. As in
        `fedsim.experiment.run`, the initial state is drawn from the root key of its cohorts.
      rounds: the number of rounds.
      test_data: the last states are evaluated on it, as by `fedsim.experiment.run`.
      how: ``"vmap"`` runs members side by side on each device, as many as its memory allows. ``"devices"`` runs one member at a
        time on each device. Both need one program for whole rounds, and examples and clients' memories on the device.
        ``"sequential"`` runs one member at a time with the algorithm's own execution, which divides each cohort among the
        devices, and works for every algorithm. None chooses ``"devices"`` on a CPU and ``"vmap"`` otherwise. If a member cannot
        run in this way, the members run sequentially, and a warning gives the reason.
      progress: whether to show a progress bar on stderr.

    Raises:
      ValueError: the settings do not have the same names, an algorithm refuses its setting or does not fit the samplers (the
        message names the setting), the samplers have different data, or the states of different settings have different shapes.
      FloatingPointError: an update was not finite, and the algorithm's ``nonfinite`` is ``"raise"``. The message names the
        setting and the seed.

    >>> import optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.arange(384, dtype=np.uint8).reshape(6, 8, 8, 1) % 17, "y": np.arange(6, dtype=np.int32)}, sizes=[4, 2])
    >>> model = fedsim.models.digits_logistic()
    >>> def make_algorithm(rate):
    ...     return fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(rate), batches=fedsim.Batches(size=2))
    >>> result = population(
    ...     make_algorithm, {"rate": [0.01, 0.1, 1.0]}, seeds=2, rounds=3, test_data=data, progress=False,
    ...     sampler=lambda seed: fedsim.UniformSampler(data, clients=2, seed=seed))
    >>> result.state.params["linear"]["w"].shape, result.infos.clients["loss"].shape
    ((3, 2, 64, 10), (3, 2, 3, 2))
    >>> result.to_pandas().index.names, result.evaluation["test_accuracy"].shape
    (FrozenList(['rate', 'seed']), (3, 2))
    """
    checks.whole(1, rounds=rounds)
    how = chosen_way(how)
    listed, chosen_seeds = listed_settings(settings), listed_seeds(seeds)
    samplers = _samplers(sampler, chosen_seeds, rounds)
    data, widest = samplers[0].data, max((c for own in samplers for c in own.cohorts), key=lambda cohort: cohort.slots)
    algorithms = [_made(make_algorithm, setting, samplers[0]) for setting in listed]
    keys = [rng.stream(own.cohort(0).key, "init") for own in samplers]
    shapes = [jax.eval_shape(algorithm.init, keys[0]) for algorithm in algorithms]
    _check_shapes(listed, shapes)
    evaluations: list[Any] = [
        default_evaluation(own, data, test_data, shape) for own, shape in zip(algorithms, shapes, strict=True)
    ]
    groups = _groups(make_algorithm, listed)
    for group in groups:
        share_programs([algorithms[i] for i in group.settings], group.make, group.numbers)
    members = list(itertools.product(range(len(listed)), range(len(chosen_seeds))))
    runs: dict[tuple[int, int], _InMemory] = {}

    def start(i: int, j: int) -> _InMemory:
        runs[i, j] = _InMemory(algorithms[i], samplers[j], rounds, inits[i](keys[j]), widest.slots)
        return runs[i, j]

    floats = {i: list(group.numbers[0]) for group in groups for i in group.settings}
    jobs = [
        Job(
            name=shown({**listed[i], "seed": chosen_seeds[j]}),
            algorithm=algorithms[i],
            like=shapes[i],
            widest=widest,
            rounds=rounds,
            data=[data],
            start=functools.partial(start, i, j),
            numbers=floats[i],
        )
        for i, j in members
    ]
    of_ways = ways(jobs, how, alike=True)
    inits = {i: init for group in groups for i, init in _inits(group, algorithms)}
    run_groups(of_ways, progress)

    def by_axes(leaves: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(leaves).reshape(len(listed), len(chosen_seeds), *leaves[0].shape)

    result = Population(
        settings=tuple(listed),
        seeds=tuple(chosen_seeds),
        state=joined([runs[member].state for member in members], by_axes),
        infos=joined([joined(runs[member].infos, np.concatenate) for member in members], by_axes),
        evaluation={},
        how=of_ways[0][0],
    )
    _warn_about_dropped(result)
    if test_data is None:
        return result
    lines = [evaluation_line(evaluations[i](runs[i, j].state, rounds, samplers[j].drawn_by), rounds) for i, j in members]
    names = [name for name in lines[0] if name not in ("round", "better")]
    # None stands for a number that is not finite.
    scores = {name: by_axes([np.array(line[name], np.float64) for line in lines]) for name in names}
    return dataclasses.replace(result, evaluation=scores)


@dataclasses.dataclass
class _Sampled:
    """A sampler whose cohorts are drawn already, by another one: they are those of all members with a seed."""

    data: FederatedData
    cohorts: Sequence[Cohort]
    drawn_by: Sampler

    def cohort(self, round: int) -> Cohort:
        return self.cohorts[round]


class _InMemory(Rounds):
    """The rounds of a member, which keeps its infos, with ``slots`` clients each, and its last state in memory."""

    def __init__(self, algorithm: Algorithm, sampler: _Sampled, rounds: int, state: State, slots: int) -> None:
        lengths = DispatchLength(min(rounds, _ROUNDS_PER_DISPATCH), [rounds])
        super().__init__(algorithm, sampler, first=sampler.cohort(0), rounds=rounds, lengths=lengths)
        self.state = algorithm.with_memory(state, sampler.data)
        self._slots, self.infos = slots, list[Any]()

    def finish(self, dispatch: DispatchedRounds, seconds: float, *, members: int = 1) -> None:
        infos = dispatch.infos
        if isinstance(infos, RoundInfo):
            if self.algorithm.nonfinite == "raise":
                report_problems(self.algorithm, infos, dispatch.cohorts)
            infos = infos._replace(clients={name: jax.tree.map(self._padded, x) for name, x in infos.clients.items()})
        self.infos.append(infos)
        if dispatch.stop == self.rounds:
            state = dispatch.state
            if isinstance(parts_of(state).clients, ClientRows):
                state = placed(state, Jit().mesh(), "resident")
            self.state = jax.device_get(state)

    def _padded(self, x: np.ndarray) -> np.ndarray:
        """Adds zeros for missing slots, so that the infos of rounds with different numbers of slots can be joined."""
        return np.pad(x, [(0, 0), (0, self._slots - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _samplers(make: Callable[[int], Sampler], seeds: Sequence[int], rounds: int) -> list[_Sampled]:
    """Draws the cohorts of all rounds with every seed, so that a wrong one is found before the first round."""
    if not callable(make):
        raise ValueError(
            f"Expected sampler to be a function from a seed to a sampler, got a {type(make).__name__}: give lambda seed: "
            "fedsim.UniformSampler(data, clients=..., seed=seed)."
        )
    samplers = [make(seed) for seed in seeds]
    first, keys, drawn = checked_cohort(samplers[0], 0), [], []
    for seed, sampler in zip(seeds, samplers, strict=True):
        own = checked_cohort(sampler, 0)
        drawn.append(_Sampled(first.data, [checked_cohort(sampler, round, own) for round in range(rounds)], sampler))
        if own.data is not first.data or own.attack != first.attack:
            raise ValueError(
                f"Expected the samplers of all seeds to have one FederatedData object and one attack, got another one for "
                f"seed={seed}: create them before, outside of the function sampler."
            )
        keys.append(np.asarray(jax.random.key_data(own.key)).tobytes())
    if len(set(keys)) < len(seeds):
        raise ValueError(
            "Expected samplers with different root keys for different seeds, got one key twice: pass the seed on, as in lambda "
            "seed: fedsim.UniformSampler(data, clients=..., seed=seed)."
        )
    return drawn


def _made(make: Callable[..., Algorithm], setting: Setting, sampler: _Sampled) -> Algorithm:
    """Returns the algorithm of a setting, after all checks that need concrete numbers."""
    try:
        algorithm = make(**setting)
        if not isinstance(algorithm, Algorithm):
            raise ValueError(f"Expected make_algorithm to return a fedsim.Algorithm, got a {type(algorithm).__name__}.")
        check_fits(sampler.drawn_by, algorithm)
        algorithm.check(sampler.data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"With the setting {shown(setting)}: {error}") from error
    return algorithm


def _check_shapes(settings: Sequence[Setting], states: Sequence[State]) -> None:
    """Raises ``ValueError`` unless the states of all settings have one structure and the same shapes."""

    def form(state: State) -> Any:
        return jax.tree.structure(state), [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(state)]

    for setting, state in zip(settings, states, strict=True):
        if form(state) != form(states[0]):
            raise ValueError(
                f"Expected states of the same shapes with all settings, got other shapes with {shown(setting)} than with "
                f"{shown(settings[0])}: call fedsim.population for each of them."
            )


def _groups(make: Callable[..., Algorithm], settings: Sequence[Setting]) -> list[_Group]:
    """Divides the settings into groups that differ only in floats."""

    def is_float(name: str) -> bool:
        values = [setting[name] for setting in settings]
        are_numbers = all(isinstance(value, numbers.Real | jax.Array) and not isinstance(value, bool) for value in values)
        return are_numbers and not all(isinstance(value, numbers.Integral) for value in values)

    floats = [name for name in settings[0] if is_float(name)]
    groups: list[_Group] = []
    for i, setting in enumerate(settings):
        constants = {name: value for name, value in setting.items() if name not in floats}
        group = next((group for group in groups if group.constants == constants), None)
        if group is None:
            groups.append(group := _Group([], [], constants, functools.partial(make, **constants)))
        group.settings.append(i)
        # JAX arrays stay arrays, which may have another dtype or be vectors.
        own = {name: setting[name] for name in floats}
        group.numbers.append({name: x if isinstance(x, jax.Array) else float(x) for name, x in own.items()})
    return groups


def _inits(group: _Group, algorithms: Sequence[Algorithm]) -> Iterator[tuple[int, Callable[[jax.Array], State]]]:
    """Yields the index of each setting, and the function from a key to its initial state, whose programs settings share."""
    models = {id(getattr(algorithms[i], "model", None)) for i in group.settings}
    makes_models = len(models) > 1 and bool(arguments_of(algorithms[group.settings[0]]))
    init: Any = jax.jit(lambda numbers, key: group.make(**numbers).init(key))
    for i, values in zip(group.settings, group.numbers, strict=True):
        yield i, functools.partial(init, values) if makes_models else algorithms[i].init


def _warn_about_dropped(result: Population) -> None:
    """Warns once about all updates that were not finite."""
    if not isinstance(result.infos, RoundInfo):
        return
    counts = result.infos.num_dropped.sum(-1)
    if counts.any():
        i, j = np.argwhere(counts)[0]
        warnings.warn(
            f"{counts.sum()} client update(s) of {np.count_nonzero(counts)} of {counts.size} members held a NaN or an infinity "
            f"and did not reach the server, the first with {shown({**result.settings[i], 'seed': result.seeds[j]})}. "
            "infos.num_dropped counts them. Try a lower client learning rate.",
            stacklevel=3,
        )
