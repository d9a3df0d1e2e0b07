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
from tqdm import tqdm

from fedsim import checks, rng
from fedsim.algorithm import Algorithm
from fedsim.configuration import How
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import (
    Jit,
    Member,
    arguments_of,
    joined,
    most_side_by_side,
    obstacle,
    placed,
    remembered,
    report_problems,
    run_members,
    share_programs,
)
from fedsim.experiment.driving import DispatchLength, cohorts, default_evaluation, evaluation_line, round_lines
from fedsim.rounds import RoundInfo, parts_of
from fedsim.samplers import Sampler, checked_cohort
from fedsim.sweeps._grid import Setting, listed_seeds, listed_settings, shown

if TYPE_CHECKING:
    import pandas

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
      ValueError: the settings do not have the same names, an algorithm refuses its setting (the message names the setting), the
        samplers have different data, or the states of different settings have different shapes.

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
    chosen_way(how)  # raises ValueError for an unknown way
    listed, chosen_seeds = listed_settings(settings), listed_seeds(seeds)
    samplers = _samplers(sampler, chosen_seeds, rounds)
    firsts = [checked_cohort(own, 0) for own in samplers]
    data, count = firsts[0].data, len(chosen_seeds)
    algorithms = [_made(make_algorithm, setting, data) for setting in listed]
    keys = [rng.stream(first.key, "init") for first in firsts]
    shapes = [jax.eval_shape(algorithm.init, keys[0]) for algorithm in algorithms]
    _check_shapes(listed, shapes)
    evaluations: list[Any] = [
        default_evaluation(own, data, test_data, shape) for own, shape in zip(algorithms, shapes, strict=True)
    ]
    groups = _groups(make_algorithm, listed)
    for group in groups:
        share_programs([algorithms[i] for i in group.settings], group.make, group.numbers)
    how = _way(how, groups, algorithms, shapes, firsts[0])
    starts = {at: state for group in groups for at, state in _starts(group, algorithms, keys)}

    parts, order = [], []
    with tqdm(total=len(listed) * count * rounds, unit="round", disable=not progress, dynamic_ncols=True) as bar:
        for group in groups:
            numbered = [(i, j) for i in group.settings for j in range(count)]
            members = [Member(algorithms[i], starts[i, j], samplers[j].cohort, j) for i, j in numbered]
            if how == "sequential":
                alone = [
                    _run_alone(member, samplers[j], rounds, firsts[j], bar.update)
                    for member, (_, j) in zip(members, numbered, strict=True)
                ]
                states, infos = zip(*alone, strict=True)
                parts.append((joined(states, np.stack), joined(infos, np.stack)))
            else:
                parts.append(_run_together(members, rounds, how, data, bar.update))
            order += [i * count + j for i, j in numbered]
    at = np.argsort(order)

    def by_axes(of_groups: Sequence[Any]) -> Any:
        return joined(of_groups, lambda leaves: (x := np.concatenate(leaves)[at]).reshape(len(listed), count, *x.shape[1:]))

    states, infos = map(by_axes, zip(*parts, strict=True))
    result = Population(settings=tuple(listed), seeds=tuple(chosen_seeds), state=states, infos=infos, evaluation={}, how=how)
    for (i, own), (j, seed) in itertools.product(enumerate(algorithms), enumerate(samplers)):
        info = jax.tree.map(lambda x, i=i, j=j: x[i, j], result.infos)
        if own.nonfinite == "raise" and isinstance(info, RoundInfo):
            report_problems(own, info, [seed.cohort(r) for r in range(rounds)])
    _warn_about_dropped(result)
    if test_data is None:
        return result
    lines = [
        evaluation_line(evaluation(result.state_of(i, j)), rounds)
        for (i, evaluation), j in itertools.product(enumerate(evaluations), range(count))
    ]
    names = [name for name in lines[0] if name not in ("round", "better")]
    # None stands for a number that is not finite.
    scores = {name: np.array([line[name] for line in lines], np.float64) for name in names}
    shaped = {name: rows.reshape(len(listed), count, *rows.shape[1:]) for name, rows in scores.items()}
    return dataclasses.replace(result, evaluation=shaped)


def _samplers(make: Callable[[int], Sampler], seeds: Sequence[int], rounds: int) -> list[Sampler]:
    if not callable(make):
        raise ValueError(
            f"Expected sampler to be a function from a seed to a sampler, got a {type(make).__name__}: give lambda seed: "
            "fedsim.UniformSampler(data, clients=..., seed=seed)."
        )
    samplers = [make(seed) for seed in seeds]
    first, keys = checked_cohort(samplers[0], 0), []
    for seed, sampler in zip(seeds, samplers, strict=True):
        own = checked_cohort(sampler, 0)
        checked_cohort(sampler, rounds - 1, own)  # A schedule that is too short raises its error now.
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
    return samplers


def _made(make: Callable[..., Algorithm], setting: Setting, data: FederatedData) -> Algorithm:
    """Returns the algorithm of a setting, after all checks that need concrete numbers."""
    try:
        algorithm = make(**setting)
        if not isinstance(algorithm, Algorithm):
            raise ValueError(f"Expected make_algorithm to return a fedsim.Algorithm, got a {type(algorithm).__name__}.")
        algorithm.check(data)
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
    groups: list[tuple[dict[str, Any], _Group]] = []
    for i, setting in enumerate(settings):
        constant = {name: value for name, value in setting.items() if name not in floats}
        group = next((group for known, group in groups if known == constant), None)
        if group is None:
            group = _Group([], [], functools.partial(make, **constant))
            groups.append((constant, group))
        group.settings.append(i)
        # JAX arrays stay arrays, which may have another dtype or be vectors.
        own = {name: setting[name] for name in floats}
        group.numbers.append({name: x if isinstance(x, jax.Array) else float(x) for name, x in own.items()})
    return [group for _, group in groups]


def _way(
    how: How | None, groups: Sequence[_Group], algorithms: Sequence[Algorithm], shapes: Sequence[State], first: Cohort
) -> How:
    """Returns how members run, and warns if it is not as the caller or the device suggests."""
    if how == "sequential":
        return how
    reason = next((text for group in groups if (text := _obstacle(group, algorithms, shapes, first))), None)
    if reason is None:
        return chosen_way(how)
    warnings.warn(f"The members run one after another (how='sequential'), because {reason}.", stacklevel=3)
    return "sequential"


def chosen_way(how: How | None) -> How:
    """Returns ``how``; None is ``"devices"`` on a CPU and ``"vmap"`` otherwise.

    >>> chosen_way("sequential")
    'sequential'
    """
    if how is None:
        return "devices" if jax.default_backend() == "cpu" else "vmap"
    checks.one_of("vmap", "devices", "sequential", how=how, remedy="None chooses by the device")
    return how


def why_alone(algorithm: Algorithm, state: State, first: Cohort) -> str | None:
    """Returns why members with this algorithm cannot run together; None if they can. The arguments are those of `obstacle`."""
    if type(algorithm).apply is not Algorithm.apply:
        return f"{type(algorithm).__name__}.apply is not compiled"
    return obstacle(algorithm, state, first)


def _obstacle(group: _Group, algorithms: Sequence[Algorithm], shapes: Sequence[State], first: Cohort) -> str | None:
    for i in group.settings:
        if reason := why_alone(algorithms[i], shapes[i], first):
            return reason
        if group.numbers[0] and not arguments_of(algorithms[i]):
            names = ", ".join(group.numbers[0])
            return f"the code needs the values of numbers ({names}), so it is compiled for every setting"
    return None


def _makes_models(group: _Group, algorithms: Sequence[Algorithm]) -> bool:
    """Returns whether ``make_algorithm`` creates a model for every setting, whose programs would be compiled for each."""
    models = {id(getattr(algorithms[i], "model", None)) for i in group.settings}
    return len(models) > 1 and bool(arguments_of(algorithms[group.settings[0]]))


def _starts(
    group: _Group, algorithms: Sequence[Algorithm], keys: Sequence[jax.Array]
) -> Iterator[tuple[tuple[int, int], State]]:
    """Yields the initial state of each setting and seed, by their indices."""
    init: Any = None
    if _makes_models(group, algorithms):
        init = jax.jit(lambda numbers, key: group.make(**numbers).init(key))
    for i, values in zip(group.settings, group.numbers, strict=True):
        for j, key in enumerate(keys):
            yield (i, j), init(values, key) if init else algorithms[i].init(key)


def _run_together(
    members: Sequence[Member], rounds: int, how: How, data: FederatedData, advance: Callable[[int], object]
) -> tuple[State, RoundInfo]:
    algorithm: Any = members[0].algorithm
    together = side_by_side(how, len(members), algorithm, members[0].state, data)
    return run_members(members, rounds, algorithm.execution, side_by_side=together, advance=advance)


def side_by_side(how: How, members: int, algorithm: Any, state: State, data: FederatedData) -> int:
    """Returns how many of some members run side by side on a device, and warns if the memory does not suffice for all.

    Args:
      how: ``"vmap"`` or ``"devices"``.
      members: the number of members.
      algorithm: of one of them.
      state: its state, of arrays or ``jax.ShapeDtypeStruct``.
      data: the population.
    """
    if how == "devices":
        return 1
    mesh = algorithm.execution.mesh()
    most, wanted = most_side_by_side(remembered(algorithm, state, data), mesh, data), -(-members // mesh.size)
    if most < wanted:
        warnings.warn(
            f"The memory suffices for {most} of {wanted} members side by side on a device, so they run in turns.",
            stacklevel=5,
        )
    return min(most, wanted)


def _run_alone(
    member: Member, sampler: Sampler, rounds: int, first: Cohort, advance: Callable[[int], object]
) -> tuple[State, Any]:
    """Runs one member with the algorithm's own execution; returns its state and its infos on the host."""
    algorithm: Any = member.algorithm
    lengths, infos, done = DispatchLength(None, [rounds]), [], 0
    state = algorithm.with_memory(member.state, first.data)
    while done < rounds:
        together = cohorts(sampler, done, min(lengths.limit, rounds - done), first)
        state, info = algorithm.apply_rounds(state, together, max_rounds=lengths.limit)
        infos.append(jax.device_get(info))
        done += len(together)
        advance(len(together))
    if isinstance(parts_of(state).clients, ClientRows):
        state = placed(state, Jit().mesh(), "resident")
    slots = max((len(info.clients["weight"][0]) for info in infos if isinstance(info, RoundInfo)), default=0)
    info = joined([_padded(info, slots) for info in infos], np.concatenate)
    return jax.device_get(state), info


def _padded(info: Any, slots: int) -> Any:
    """Adds zeros for missing slots, so that the infos of rounds with different numbers of slots can be joined."""
    if not isinstance(info, RoundInfo):
        return info
    return info._replace(
        clients=jax.tree.map(
            lambda x: np.pad(x, [(0, 0), (0, slots - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]), dict(info.clients)
        )
    )


def _warn_about_dropped(result: Population) -> None:
    """Warns once about all updates that were not finite."""
    if not isinstance(result.infos, RoundInfo):
        return
    counts = result.infos.num_dropped.sum(-1)
    if counts.any():
        i, j = np.argwhere(counts)[0]
        warnings.warn(
            f"{counts.sum()} client update(s) of {np.count_nonzero(counts)} of {counts.size} members held a NaN or an infinity "
            f"and were left out, the first with {shown({**result.settings[i], 'seed': result.seeds[j]})}. infos.num_dropped "
            "counts them. Try a lower client learning rate.",
            stacklevel=3,
        )
