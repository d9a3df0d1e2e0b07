"""Older models: the bound of stale synchronous parallel, and FedAsync and FedBuff against synchronous rounds.

Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS 2013; C. Xie, S.
Koyejo, I. Gupta, "Asynchronous federated optimization", 2019, https://arxiv.org/abs/1903.03934; J. Nguyen et al., "Federated
learning with buffered asynchronous aggregation", AISTATS 2022, https://arxiv.org/abs/2106.06639, which reports that FedBuff is
3.3 times more efficient than synchronous rounds and up to 2.5 times more than FedAsync, on other data and with larger cohorts.
K.-J. Hsu, "UNUS: A reliable and efficient federated learning framework with programmability and portability", master's thesis,
National Tsing Hua University, 2021, uses stale synchronous parallel; no public figures of it were found.

Bounds: as in Ho et al., the server adds the updates of all workers, here with the factor 1 / workers, so every update counts
the same whatever the bound. All bounds get the same number of updates. Two laws of speeds are compared, because a bound helps
against delays that change from round to round and not against workers that are always slow.

FedAsync and FedBuff: all methods have 30 clients in flight. Each has the learning rate, and FedAsync the mixing weight, with
which seed 0 reaches the target in the least simulated time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim.aggregators import Sum
from fedsim.algorithms import FedAvg
from fedsim.reproductions._clock import SPEEDS, Task, TimedCurve, digits, femnist_writers, needs_data, train_on_clock
from fedsim.reproductions._femnist import NEEDS
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty, mean_and_std
from fedsim.samplers import UniformSampler
from fedsim.systems import (
    Asynchronous,
    Buffered,
    Devices,
    LogNormal,
    PolynomialWeight,
    StaleSynchronous,
    Synchronization,
    Synchronous,
)

_BOUNDS = (0, 1, 2, 4, 8, None)
_LAWS = {
    "constant": ("each worker keeps its speed", SPEEDS),
    "varying": ("speeds vary from round to round", Devices(variation=LogNormal(sigma=1.0))),
}
_CONCURRENCY, _LAST = 30, 4
_RATES, _MIXINGS = (0.2, 0.4, 0.8), (0.3, 0.6, 0.9)
_Load = Callable[[Request, int], Task]
# The loader, the number of workers, and the accuracy to reach.
_BOUND_TASKS: dict[str, tuple[_Load, int, float]] = {
    "digits": (functools.partial(digits, clients=20), 20, 0.93),
    "femnist": (femnist_writers, 30, 0.5),
}
_METHOD_TASKS: dict[str, tuple[_Load, float]] = {"digits": (digits, 0.93), "femnist": (femnist_writers, 0.6)}


def _cases(request: Request) -> Mapping[str, Case]:
    bounds: dict[str, Case] = {
        f"{name}-bound-{law}": functools.partial(_bounds, request, *task, *_LAWS[law])
        for name, task in _BOUND_TASKS.items()
        for law in _LAWS
    }
    methods = {f"{name}-methods": functools.partial(_methods, request, *task) for name, task in _METHOD_TASKS.items()}
    return needs_data(request, bounds | methods)


def _bounds(request: Request, load: _Load, most: int, target: float, law: str, devices: Devices) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=40)
    for bound in _BOUNDS:
        found: list[TimedCurve] = []
        for seed in extent.seeds:
            task = load(request, seed)
            workers = min(most, task.train.num_clients)
            updates = extent.rounds * workers
            algorithm = FedAvg(
                model=task.model,
                client_optimizer=optax.sgd(task.rate),
                batches=task.batches,
                aggregator=Sum(),
                weighting="uniform",
                server_optimizer=optax.sgd(1 / workers),
            )
            found.append(
                train_on_clock(
                    algorithm,
                    UniformSampler(task.train, clients=workers, seed=seed),
                    updates=updates,
                    per_step=1 if bound != 0 else workers,
                    every=workers,
                    score=task.accuracy,
                    synchronization=StaleSynchronous(bound=updates if bound is None else bound),
                    devices=devices,
                )
            )
            request.log(f"{task.title}, {law}, bound {bound}: seed {seed}, {found[-1].curve.seconds:.0f} s")
        accuracies = [100 * each.curve.mean_of_last(_LAST) for each in found]
        times = [each.seconds_to_target(target) for each in found]
        ends = [float(each.times[-1]) for each in found]
        staleness = [_staleness(each) for each in found]
        shared: dict[str, Any] = {
            "case": f"{task.title}, {law}, bound {'∞' if bound is None else bound}",
            "settings": {"workers": workers, "updates": updates, "rate": task.rate, "devices": str(devices)},
            "reduced": join_nonempty(task.reduced, extent.reduced()),
        }
        yield Row.of_seeds(
            accuracies,
            digits=1,
            measure=f"test accuracy after {updates:,} updates, %",
            seconds=sum(each.curve.seconds for each in found),
            details={"simulated seconds": ends, "mean staleness": staleness},
            note=f"at {np.mean(ends):,.0f} simulated seconds; mean staleness {np.mean(staleness):.1f} server steps",
            **shared,
        )
        yield Row.of_seeds(
            times,
            digits=0,
            measure=f"simulated seconds to {target:.0%}",
            **shared,
        )


def _staleness(found: TimedCurve) -> float:
    return float(found.schedule.updates.staleness.mean())


def _synchronizations(concurrency: int) -> dict[str, tuple[Callable[[float], Synchronization], int, tuple[float, ...]]]:
    """Returns for each method the model as a function of the mixing weight, its updates per step, and the mixing weights."""
    buffer = min(10, concurrency)
    over = Synchronous(over_selection=1.3)
    weight = PolynomialWeight(0.5)
    return {
        "synchronous": (lambda _: Synchronous(), concurrency, (1.0,)),
        "synchronous, over-selection 1.3": (lambda _: over, int(np.ceil(concurrency / 1.3)), (1.0,)),
        "FedAsync": (
            lambda mixing: Asynchronous(concurrency=concurrency, mixing=mixing, staleness_weight=weight),
            1,
            _MIXINGS,
        ),
        f"FedBuff, K = {buffer}": (lambda _: Buffered(size=buffer, concurrency=concurrency), buffer, (1.0,)),
    }


def _methods(request: Request, load: _Load, target: float) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=200)
    base: dict[str, list[float | None]] = {}
    concurrency = min(_CONCURRENCY, load(request, 0).train.num_clients)
    for method, (model, per_step, mixings) in _synchronizations(concurrency).items():

        def run(
            seed: int,
            rate: float,
            mixing: float,
            model: Callable[[float], Synchronization] = model,
            per_step: int = per_step,
        ) -> TimedCurve:
            task = load(request, seed)
            return train_on_clock(
                FedAvg(model=task.model, client_optimizer=optax.sgd(rate), batches=task.batches),
                UniformSampler(task.train, clients=concurrency, seed=seed),
                updates=extent.rounds * concurrency,
                per_step=per_step,
                every=concurrency,
                score=task.accuracy,
                until=target,
                synchronization=model(mixing),
                devices=SPEEDS,
            )

        grid = list(itertools.product(_RATES, mixings))
        tried = {each: run(0, *each) for each in (grid[:1] if request.quick else grid)}
        rate, mixing = min(tried, key=lambda each: tried[each].seconds_to_target(target) or np.inf)
        found = [tried[rate, mixing], *(run(seed, rate, mixing) for seed in extent.seeds[1:])]
        task = load(request, 0)
        updates = [each.updates_to_target(target) for each in found]
        times = [each.seconds_to_target(target) for each in found]
        seconds = sum(each.curve.seconds for each in [*tried.values(), *found[1:]])
        request.log(f"{task.title}, {method}: rate {rate}, mixing {mixing}, {updates} updates, {times}, {seconds:.0f} s")
        chosen = f"learning rate {rate:g}" + (f", mixing weight {mixing:g}" if len(mixings) > 1 else "")
        for measure, values in (("client updates", updates), ("simulated seconds", times)):
            fewer = [a / b for a, b in zip(base.setdefault(measure, values), values, strict=True) if a and b]
            less = "fewer" if measure == "client updates" else "less"
            ratio = f"{mean_and_std(fewer, 2)} times {less} than synchronous; " if fewer and method != "synchronous" else ""
            yield Row.of_seeds(
                values,
                digits=0,
                case=f"{task.title}: {method}",
                measure=f"{measure} to {target:.0%}",
                paper="3.3 times fewer than synchronous, up to 2.5 than FedAsync (other data)"
                if method.startswith("FedBuff") and measure == "client updates"
                else "",
                seconds=seconds if measure == "client updates" else 0.0,
                settings={"rate": rate, "mixing": mixing, "concurrency": concurrency, "devices": str(SPEEDS)},
                details={"mean staleness": [_staleness(each) for each in found], "times fewer": fewer},
                reduced=join_nonempty(task.reduced, extent.reduced(rounds=not all(values))),
                note=f"{ratio}{chosen}",
            )


UNUS_STALENESS = Reproduction(
    name="unus_staleness",
    title="Updates from older models: stale synchronous parallel by its bound, FedAsync and FedBuff, in simulated time",
    paper="J. Nguyen et al. Federated learning with buffered asynchronous aggregation. AISTATS, 2022. "
    "https://arxiv.org/abs/2106.06639 (FedBuff); C. Xie, S. Koyejo, I. Gupta. Asynchronous federated optimization. 2019. "
    "https://arxiv.org/abs/1903.03934 (FedAsync); Q. Ho et al. More effective distributed ML via a stale synchronous parallel "
    "parameter server. NeurIPS, 2013",
    duration="1 to 4 min per case of 3 seeds, 6 cases",
    required_data=f"digits: none; {NEEDS}",
    cases=_cases,
    notes="Bounds: the server adds the updates of all workers times 1 / workers, so each counts the same whatever the bound; "
    "the digits have 20 workers, with all of the training data, and FEMNIST 30 writers. All bounds get as many updates as 40 "
    "rounds of all workers have; the accuracy is the mean over the last four of them. A speed is the time of a local step, "
    "which each worker draws once from a log-normal law with median 1 second and σ = 1; or all are the same, and each local "
    "round takes longer by a factor from that law. Messages take no time. A bound saves more time if speeds vary; if workers "
    "keep them, all wait for the slowest in the end, and without a bound the data of fast workers counts more. FedAsync and "
    "FedBuff: all methods have 30 clients in flight, which keep their speeds. Each has the learning rate (0.2, 0.4 or 0.8) "
    "and FedAsync the mixing weight (0.3, 0.6 or 0.9) with which seed 0 reaches the target on the test examples in the least "
    "simulated time; both weigh updates by (1 + staleness)^-0.5. Client updates are those that the server aggregates, and a "
    "learning rate of 0.8 is the largest that was tried. The methods differ less in updates than in time, and less than "
    "published: those are of other data and, as recalled, of about 1,000 clients in flight. Stale synchronous parallel is "
    "also the method of K.-J. Hsu's UNUS (master's thesis, National Tsing Hua University, 2021), of which no public figures "
    "were found.",
)
