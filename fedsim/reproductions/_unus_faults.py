"""Clients that fail and messages that are lost: accuracy and simulated time, relative to a run without faults.

K.-J. Hsu, "UNUS: A reliable and efficient federated learning framework with programmability and portability", master's thesis,
National Tsing Hua University, 2021, implements fault tolerance. No public figures of it were found, so there is nothing to
compare with.

Ten clients a round train in synchronous rounds. A client that fails does so after a uniform fraction of its local steps, and
can be selected again at once; of a message, either direction may be lost, with the same probability. The policy is the default
one: no message is repeated, and the server notices at once that an update will not come, and sends the model to another client.
So every round has ten updates, and faults cost time. The last case is also run with up to 3 repetitions of every message. Where
the run takes more than twice as long as without faults, a row has the accuracy at twice that time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim.algorithms import FedAvg
from fedsim.reproductions._clock import SPEEDS, Task, TimedCurve, digits, femnist_writers, needs_data, train_on_clock
from fedsim.reproductions._femnist import NEEDS
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler
from fedsim.systems import Faults, Policy

_COHORT, _EVERY, _LAST = 10, 10, 4
_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5)
_BOTH = Faults(message_loss=0.3, client_failures=0.2)
_Settings = Mapping[str, tuple[Faults, Policy]]
_KINDS: dict[str, _Settings] = {
    "failures": {f"{level:.0%} of clients fail": (Faults(client_failures=level), Policy()) for level in _LEVELS},
    "losses": {f"{level:.0%} of messages lost": (Faults(message_loss=level), Policy()) for level in _LEVELS},
    "both": {
        "30% of messages lost, 20% of clients fail": (_BOTH, Policy()),
        "30% of messages lost, 20% of clients fail, up to 3 repetitions": (_BOTH, Policy(retries=3)),
    },
}
_TASKS: dict[str, Callable[[Request, int], Task]] = {"digits": digits, "femnist": femnist_writers}


def _cases(request: Request) -> Mapping[str, Case]:
    return needs_data(
        request,
        {
            f"{name}-{kind}": functools.partial(_run, request, load, settings)
            for name, load in _TASKS.items()
            for kind, settings in _KINDS.items()
        },
    )


def _run(request: Request, load: Callable[[Request, int], Task], faulty: _Settings) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=300)
    found: dict[str, list[TimedCurve]] = {}
    for title, (faults, policy) in {"no faults": (Faults(), Policy()), **faulty}.items():
        for seed in extent.seeds:
            task = load(request, seed)
            cohort = min(_COHORT, task.train.num_clients)
            curve = train_on_clock(
                FedAvg(model=task.model, client_optimizer=optax.sgd(task.rate), batches=task.batches),
                UniformSampler(task.train, clients=cohort, seed=seed),
                updates=extent.rounds * cohort,
                per_step=cohort,
                every=_EVERY * cohort,
                score=task.accuracy,
                devices=SPEEDS,
                faults=faults,
                policy=policy,
            )
            found.setdefault(title, []).append(curve)
            request.log(f"{task.title}, {title}: seed {seed}, {curve.curve.seconds:.0f} s")
        yield from _rows(task, title, found["no faults"], found[title], join_nonempty(task.reduced, extent.reduced()))


def _rows(task: Task, title: str, clean: list[TimedCurve], faulty: list[TimedCurve], reduced: str) -> Iterator[Row]:
    def accuracy(each: TimedCurve, until: float = np.inf) -> float:
        scores = [score for score, time in zip(each.curve.scores, each.times, strict=True) if time <= until]
        return 100 * float(np.mean(scores[-_LAST:])) if scores else 0.0

    pairs = list(zip(clean, faulty, strict=True))
    accuracies = [accuracy(each) for each in faulty]
    of_clean = [100 * accuracy(b) / accuracy(a) for a, b in pairs]
    in_time = [100 * accuracy(b, 2 * a.schedule.seconds) / accuracy(a) for a, b in pairs]
    multiples = [b.schedule.seconds / a.schedule.seconds for a, b in pairs]
    lost = [each.schedule.totals.lost / each.schedule.totals.dispatched for each in faulty]
    shared: dict[str, Any] = {"case": f"{task.title}, {title}", "reduced": reduced}
    rows = [("test accuracy, %", accuracies, 1, f"{np.mean(lost):.0%} of dispatches bring no update")]
    if faulty is not clean:
        rows += [
            ("accuracy, % of that without faults", of_clean, 1, ""),
            ("simulated time, multiple of that without faults", multiples, 2, ""),
        ]
    if max(multiples) > 2:
        rows.append(("accuracy in twice the time, % of that without faults", in_time, 1, ""))
    for index, (measure, values, places, note) in enumerate(rows):
        seconds = sum(each.curve.seconds for each in faulty) if not index else 0.0
        yield Row.of_seeds(values, digits=places, measure=measure, note=note, seconds=seconds, **shared)


UNUS_FAULTS = Reproduction(
    name="unus_faults",
    title="Failing clients and lost messages: accuracy and simulated time of synchronous rounds",
    paper="K.-J. Hsu. UNUS: A reliable and efficient federated learning framework with programmability and portability. "
    "Master's thesis, National Tsing Hua University, 2021 (no public figures were found)",
    duration="1 to 3 min per case of 3 seeds, 6 cases",
    required_data=f"digits: none; {NEEDS}",
    cases=_cases,
    notes="FedAvg in synchronous rounds of 10 clients, of the 100 of the digits or the writers of FEMNIST, for 300 rounds. "
    "A client that fails stops after a uniform fraction of its local steps, and can be selected again at once; messages are "
    "lost in either direction with the same probability. The policy is the default one: no repetitions, no time-out, and the "
    "server notices at once that no update will come, and sends the model to another client. So every round has ten updates, "
    "and faults cost time and not updates. A server without open connections would notice later, and messages that take time "
    "would cost more when they are lost. The last case of each task is also run with up to 3 repetitions of a message, after "
    "pauses of 1, 2 and 4 seconds. Each client draws once how long a local step takes, from a log-normal law with median "
    "1 second and σ = 1; messages take no time. The accuracy is the mean of the last four evaluations, which are 10 rounds "
    "apart. The column paper is empty, because no published figures were found.",
)
