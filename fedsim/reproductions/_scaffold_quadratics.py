"""SCAFFOLD and FedAvg on two quadratic functions: the rounds to the optimum by local steps and heterogeneity.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: stochastic controlled averaging for
federated learning", ICML 2020, section 7.2 and figure 3, https://arxiv.org/abs/1910.06378: N = 2 quadratic functions, both in
every round, full gradients, K = 2 or 10 local steps, server learning rate 1, a tuned client learning rate, option II. The
difference of the Hessians from their mean is δ = 1, the smoothness β is 1, and the heterogeneity of the gradients is G = 1, 10
or 100. SGD takes one step with the mean gradient in a round.

The paper's functions are in its appendix, which was not read. Here they are, in two dimensions,

    f_1(x) = Σ_j h_j x_j² + g'x  and  f_2(x) = -g'x,  so that their mean is  f(x) = 1/2 Σ_j h_j x_j²,

with h = (0.01, 1) and a vector g of norm G. Hence δ = 1, and the optimum of f is 0. f has smoothness 1, but f_1 has 2 and f_2
has 0, so the β that the paper's theorems take, which holds for every client, is 2 and not 1. All runs start where f is 25.25,
and end when f is below 0.001. The client learning rate of every row is the best 10^(k/3).

Deviations: SCAFFOLD's c_i begin as g_i(x), as in the paper's theorems, by a round that leaves x unchanged and counts; in the
case scaffold-zero they begin as 0. The paper shows curves without numbers, so the statements of section 7.2 are compared, which
has that SCAFFOLD is "twice as fast" as SGD with K = 2 and "about 5 times faster" with K = 10.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedsim import rng
from fedsim.algorithms import SCAFFOLD, FedAvg
from fedsim.data import Batches, Cohort, FederatedData
from fedsim.execution import Jit, share_programs
from fedsim.reproductions._curve import Curve, SearchResult, quality, search_rate
from fedsim.reproductions._quadratics import functions, measure_rounds, quadratic
from fedsim.reproductions._reproduction import Case, Extent, Reproduction, Request, Row

_CURVATURES = np.array([0.01, 1.0], np.float32)
_START = np.array([50**0.5, 50**0.5], np.float32)
_TARGET = 1e-3
_HETEROGENEITIES = (1, 10, 100)


class _Method(NamedTuple):
    """A method of a case: its name, its class, and whether a first round sets the control variates to the gradients."""

    name: str
    cls: type[FedAvg]
    gradients_first: bool = False


_CASES = {
    "fedavg": _Method("FedAvg", FedAvg),
    "scaffold": _Method("SCAFFOLD", SCAFFOLD, gradients_first=True),
    "scaffold-zero": _Method("SCAFFOLD, c_i = 0 at first", SCAFFOLD),
}


def problem(heterogeneity: float) -> FederatedData:
    """Returns two clients, which have f_1 and f_2.

    >>> np.linalg.norm(problem(10.0).columns["slope"], axis=1).round().tolist()
    [10.0, 10.0]
    """
    g = np.full(2, heterogeneity / 2**0.5)
    return functions(np.stack([2 * np.diag(_CURVATURES), np.zeros([2, 2])]), np.stack([-g, g]))


def maker(cls: type[FedAvg], steps: int) -> Callable[[float], Any]:
    """Returns a function from a learning rate to an algorithm, whose info has f after the round as an entry of the clients.

    >>> maker(FedAvg, 10)(0.1).batches.epochs
    10
    """

    class Measured(cls):  # type: ignore[misc, valid-type]
        def round(self, state: Any, clients: Any) -> Any:
            state, info = super().round(state, clients)
            value = 0.5 * jnp.vdot(jnp.asarray(_CURVATURES), jnp.square(state.params["x"]))
            return state, info._replace(clients={**info.clients, "f": jnp.full_like(info.clients["weight"], value)})

    def make(rate: float) -> Any:
        batches = Batches(size=1, epochs=steps)
        return Measured(
            model=quadratic(_START), client_optimizer=optax.sgd(rate), batches=batches, weighting="uniform", execution=Jit()
        )

    return make


def trained(method: _Method, make: Callable[[float], Any], data: FederatedData, rate: float, rounds: int) -> Curve:
    """Returns the curve of -f until f is below 0.001.

    >>> curve = trained(_CASES["fedavg"], maker(FedAvg, 1), problem(1.0), 1.0, 2)
    >>> [round(score, 4) for score in curve.scores]  # the second coordinate is 0 after a round
    [-0.245, -0.2401]
    """
    began, algorithm = time.perf_counter(), make(rate)
    share_programs([algorithm], make, [{"rate": rate}])
    state, first = algorithm.init(rng.root(0)), []
    if method.gradients_first:
        still = SCAFFOLD(
            model=algorithm.model,
            client_optimizer=optax.sgd(1.0),
            server_optimizer=optax.sgd(1e-30),  # too small to change x
            batches=Batches(size=1),
            control_variate="I",
        )
        state, _ = still.apply(state, Cohort(data, np.arange(2), 0, rng.root(0)))
        first = [-0.5 * float(_CURVATURES @ _START**2)]
    values = measure_rounds(algorithm, state, data, measure=lambda info: info.clients["f"][:, 0], target=_TARGET, most=rounds)
    scores = [*first, *(-values.astype(np.float64)).tolist()]
    return Curve(list(range(1, len(scores) + 1)), scores, None, time.perf_counter() - began)


def _run(request: Request, method: _Method) -> Iterator[Row]:
    extent = request.extent(seeds=1, rounds=5000, quick_rounds=100)
    found: dict[tuple[int, int], SearchResult] = {}
    for steps in (1, 2, 10):
        own = _CASES["fedavg"] if steps == 1 else method
        make = maker(own.cls, steps)
        for heterogeneity in _HETEROGENEITIES if steps > 1 else (1,):  # of SGD, g and -g cancel
            run = functools.partial(trained, own, make, problem(heterogeneity))
            # From a small rate, because with a large one every curve diverges alike.
            choice = search_rate(-6, run, rounds=extent.rounds, target=-_TARGET)
            found[steps, heterogeneity] = choice
            name = f"{own.name}, {steps} local steps, G = {heterogeneity}" if steps > 1 else "SGD, every G"
            request.log(f"{name}: {_rounds(choice.curve)}, rate {choice.rate:.3g}, {choice.seconds:.0f} s")
            yield Row(
                case=name,
                measure=f"rounds until f is below {_TARGET}",
                ours=_rounds(choice.curve),
                values=[choice.curve.rounds_to_target(-_TARGET)],
                seeds=1,
                seconds=choice.seconds,
                settings={"rate": choice.rate, "rates": choice.tried, "G": heterogeneity, "K": steps},
                reduced=extent.reduced(),
                note=f"rate {choice.rate:.3g}",
            )
    yield from _fedavg_rows(found, extent) if method.cls is FedAvg else _scaffold_rows(method, found, extent)


def _rounds(curve: Curve) -> str:
    reached = curve.rounds_to_target(-_TARGET)
    return f"{math.ceil(reached):,}" if reached else f"> {curve.rounds[-1]:,} (f = {-np.nanmax(curve.scores):.3g})"


def _fedavg_rows(found: Mapping[tuple[int, int], SearchResult], extent: Extent) -> Iterator[Row]:
    """Yields the statements that FedAvg is slower with more local steps, and with more heterogeneity."""

    def slower(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return quality(found[a].curve, -_TARGET) < quality(found[b].curve, -_TARGET)

    for g in _HETEROGENEITIES:
        text = "slower with 10 local steps than with 2"
        yield Row.counted(
            [slower((10, g), (2, g))], case=f"FedAvg, G = {g}", measure=text, paper="yes", reduced=extent.reduced()
        )
    for steps in (2, 10):
        for g in _HETEROGENEITIES[1:]:
            case, text = f"FedAvg, {steps} local steps", f"slower with G = {g} than with {g // 10}"
            held = slower((steps, g), (steps, g // 10))
            yield Row.counted([held], case=case, measure=text, paper="yes", reduced=extent.reduced())


def _scaffold_rows(method: _Method, found: Mapping[tuple[int, int], SearchResult], extent: Extent) -> Iterator[Row]:
    """Yields the speed-ups of SCAFFOLD over SGD, and whether its rounds depend on the heterogeneity."""
    reached = {each: choice.curve.rounds_to_target(-_TARGET) for each, choice in found.items()}
    for steps, stated in ((2, "2"), (10, "5")):
        case = f"{method.name}, {steps} local steps"
        of_sgd, own = reached[1, 1], reached[steps, 1]
        yield Row(
            case=case,
            measure="times faster than SGD",
            paper=stated,
            ours=f"{of_sgd / own:.1f}" if of_sgd and own else "not reached",
            seeds=1,
            reduced=extent.reduced(),
        )
        least, most = reached[steps, 1], reached[steps, 100]
        alike = bool(least and most and most <= 1.01 * least)
        text = "at most 1 % more rounds with G = 100 than with 1"
        yield Row.counted([alike], case=case, measure=text, paper="yes", reduced=extent.reduced())


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, method) for name, method in _CASES.items()}


SCAFFOLD_QUADRATICS = Reproduction(
    name="scaffold_quadratics",
    title="SCAFFOLD, FedAvg and SGD on two quadratic functions: rounds to the optimum by local steps and heterogeneity",
    paper="S. P. Karimireddy et al. SCAFFOLD: stochastic controlled averaging for federated learning. ICML 2020, section 7.2 "
    "and Figure 3. https://arxiv.org/abs/1910.06378",
    duration="fedavg: 20 min; the others: 3 min each",
    required_data="none",
    cases=_cases,
    notes="The functions are f_1(x) = 0.01 x_1² + x_2² + g'x and f_2(x) = -g'x with a vector g of norm G, so that δ = 1 as in "
    "the paper, whose own functions are in an appendix that was not read. f, the mean of both, has smoothness 1, but f_1 has "
    "2, so β, which bounds every client's, is 2 here and 1 in the paper. The 2 and 5 in *paper* are from the text of section "
    "7.2, and not read from its curves. Both clients are in every round, with full gradients. f is 25.25 at first, and 0 at "
    "its optimum. The learning rate is the best 10^(k/3) for each row. A parenthesis has the smallest f in the largest number "
    "of rounds. SCAFFOLD begins with c_i = g_i(x), which takes a round that counts, or with c_i = 0, so that its first round "
    "is one of FedAvg. With two local steps it is not faster than SGD, because f_1 has twice the curvature of f and needs half "
    "the learning rate. Arithmetic in float32, in which g and -g do not cancel exactly.",
)
