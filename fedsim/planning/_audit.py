"""`audit`: what the server learns of single clients in a round."""

from __future__ import annotations

import dataclasses

import jax

from fedsim.aggregators import StackAggregator
from fedsim.algorithm import Algorithm
from fedsim.data import Cohort
from fedsim.execution import federated_round, traced_rounds
from fedsim.primitives import Leak, Program, stages, without_mesh_of_context


@dataclasses.dataclass(frozen=True)
class Audit:
    """What the server learns of single clients in a round of an algorithm.

    Attributes:
      algorithm: the name of the algorithm.
      program: the round in stages.
      leaks: how values of single clients reach the server's state other than through a reduction.
      reported: the entries of the round's info that have one value per client, for plots and logs.
      collects: the name of the aggregator, if it needs the updates of all clients side by side; "" otherwise.
      minimum: with secure aggregation in all calls of the round, the fewest clients whose sum the server sees; 1 without, so
        that it sees every update.

    >>> program = stages(lambda x: x + 1, jax.numpy.zeros(()))
    >>> print(Audit("Mine", program, (Leak("state", "argmax", "mine.py:7"),), (), ""))
    Mine: values of single clients reach the server's state
      state depends on values of single clients through 'argmax' at mine.py:7
    """

    algorithm: str
    program: Program
    leaks: tuple[Leak, ...]
    reported: tuple[str, ...]
    collects: str
    minimum: int = 1

    def __str__(self) -> str:
        names = [name for stage in self.program.stages if stage.kind == "reduction" for name in stage.name.split(", ")]
        reductions = ", ".join(dict.fromkeys(names))
        if self.leaks:
            lines = [f"{self.algorithm}: values of single clients reach the server's state", *[f"  {x}" for x in self.leaks]]
        else:
            lines = [
                f"{self.algorithm}: the server's state depends on single clients only through these reductions: {reductions}"
            ]
        if self.collects:
            lines.append(f"  {self.collects} needs every client's update, so the server must be trusted with them")
        if self.minimum > 1:
            lines.append(f"  of the clients' updates, the server sees no more than the sum of at least {self.minimum}")
        if self.reported:
            lines.append(f"  the round's info reports per client: {', '.join(self.reported)}")
        return "\n".join(lines)


@without_mesh_of_context()
def audit(algorithm: Algorithm, cohort: Cohort) -> Audit:
    """Checks that the server's state after a round depends on the clients only through reductions.

    The check follows every value through the traced program of the round, so it holds for all data. It names the operation and
    the line of source of a violation. ``audit(...).program.run(...)`` runs the round stage by stage, see
    `fedsim.primitives.stages`.

    Args:
      algorithm: the algorithm.
      cohort: the clients of the round.

    Raises:
      ValueError: the algorithm overrides ``apply``, so its round is not a traced program.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> print(audit(algorithm, fedsim.UniformSampler(data, clients=2, seed=0).cohort(0)))
    FedAvg: the server's state depends on single clients only through these reductions: Mean, sum
      the round's info reports per client: dropped, loss, weight
    """
    if type(algorithm).apply is not Algorithm.apply:
        raise ValueError(
            f"{type(algorithm).__name__} overrides apply with a Python loop, so there is no program to check: define round or "
            "client_update instead."
        )
    state = jax.eval_shape(algorithm.init, jax.random.key(0))  # A large model would take memory.
    function, args = federated_round(algorithm, state, cohort)
    program = stages(function, *args)
    of_state = tuple(leak for leak in program.leaks if leak.result.startswith("result[0]"))
    named = [leak.result.removeprefix("result[1]").removeprefix(".clients") for leak in program.leaks if leak not in of_state]
    traced = traced_rounds(algorithm, state, cohort.data)[0].trace()
    aggregators = [call.aggregator for call in traced.calls if call.aggregator is not None]
    collecting = [type(x.innermost).__name__ for x in aggregators if isinstance(x.innermost, StackAggregator)]
    return Audit(
        algorithm=type(algorithm).__name__,
        program=program,
        leaks=tuple(dataclasses.replace(leak, result=f"state{leak.result.removeprefix('result[0]')}") for leak in of_state),
        reported=tuple(sorted(name.strip("[]'") for name in named)),
        collects=collecting[0] if collecting else "",
        minimum=min((x.fewest_clients for x in aggregators), default=1),
    )
