"""What each of the four ways of learning together costs, in closed forms: bytes, simulated time and energy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedsim import rng
from fedsim.data import FederatedData
from fedsim.decentralized import one_peer_exponential
from fedsim.decentralized.costs import Gossip, RingAllReduce
from fedsim.model import Model
from fedsim.reproductions._reproduction import Request
from fedsim.samplers import Sampler, Stragglers, UniformSampler
from fedsim.systems import Devices, EnergyModel, LogNormal

_STRAGGLERS = 0.5  # how many of the devices
topology = functools.cache(one_peer_exponential)  # of collaborative learning


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the devices are: how fast they and their links are, and what they consume."""

    devices: Devices
    energy: EnergyModel


# Data centre, all assumed: links of 10 Gbit/s, network cards of 10 W at that rate, and a processor core of 10 W per machine.
# Phone: the median rates of J. Huang et al., "A close examination of performance and power characteristics of 4G LTE networks",
# MobiSys 2012, 6 Mbit/s up and 13 Mbit/s down, and its power of 1,288 mW + 438 (up) or 52 (down) mW per Mbit/s, as recalled,
# at these rates; a latency of 35 ms, 2 W of computing and the speeds of steps are assumed.
PLACES = {
    "data centre": Place(
        Devices(seconds_per_step=1e-3, upload_rate=1.25e9, download_rate=1.25e9, latency=5e-5),
        EnergyModel(joules_per_byte_up=8e-9, joules_per_byte_down=8e-9, watts=10.0),
    ),
    "phone": Place(
        Devices(seconds_per_step=LogNormal(sigma=0.5, median=1e-2), upload_rate=6e6 / 8, download_rate=13e6 / 8, latency=0.035),
        EnergyModel(joules_per_byte_up=5.2e-6, joules_per_byte_down=1.2e-6, watts=2.0),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Devices with data, and the work of a round.

    Attributes:
      title: its name in the table.
      load: returns the training and test examples of the devices.
      model: returns the model.
      batch: the examples of a gradient.
      local_steps: the gradients of a device in a round, at least 2 with stragglers.
      rounds: the number of rounds.
      stragglers: "dropped" or "partial": half of the devices of a round, at random, manage only 1 to ``local_steps`` - 1 steps
        in the time of a round. Empty: there are none.
      central: the number of batches that offloading averages in a step.
      rates: the learning rates, of which every way has the best.
    """

    title: str
    load: Callable[[Request, int], tuple[FederatedData, FederatedData]]
    model: Callable[[], Model]
    batch: int = 10
    local_steps: int = 5
    rounds: int = 40
    stragglers: str = ""
    central: int = 1
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)


def sampler_of(way: str, scenario: Scenario, data: FederatedData, seed: int) -> Sampler:
    """Returns all devices in every round, or, with stragglers, what they manage.

    An all-reduce cannot use a part of a step. So distributed learning drops stragglers, or waits for them.
    """
    everyone: Sampler = UniformSampler(data, clients=data.num_clients, seed=seed)
    drop = scenario.stragglers == "dropped"
    if not scenario.stragglers or way == "offloading" or (way == "distributed" and not drop):
        return everyone
    return Stragglers(everyone, fraction=_STRAGGLERS, epochs=scenario.local_steps, drop=drop)


class Costs(NamedTuple):
    """What a way costs from the beginning until every device has the model of a round.

    Attributes:
      up, down: the bytes that a device sends and receives, a mean over devices.
      through_server: the bytes that a server receives and sends.
      seconds: the simulated time.
      joules: of all devices, and of the server's computing; what the server's network consumes is left out.
    """

    up: float
    down: float
    through_server: float
    seconds: float
    joules: float

    def until(self, rounds: float, each: Costs) -> Costs:
        """Returns these costs plus those of a number of rounds."""
        return Costs(*(once + rounds * more for once, more in zip(self, each, strict=True)))


def costs(way: str, scenario: Scenario, data: FederatedData, values: int, place: Place, seed: int = 0) -> tuple[Costs, Costs]:
    """Returns what is paid once, for the examples and the final model, and what is paid in every round.

    Messages of different devices do not slow each other down. Devices wait for the slowest in every round, and those of
    distributed learning in every step. A straggler that manages a part of its steps in the time of a round is slower by that
    factor in distributed learning.

    Args:
      way: the way.
      scenario: batches, local steps and stragglers.
      data: the training examples of the devices, where they arose.
      values: the number of the model's parameters, 4 bytes each.
      place: the devices' links, speeds and energy; the server is in the data centre.
      seed: of the speeds.
    """
    n, steps, model, examples = data.num_clients, scenario.local_steps, 4 * values, data.nbytes / data.num_clients
    drawn = place.devices.draw(data.client_ids, rng.root(seed))
    latency, upload, download = drawn.latency.max(), drawn.upload_rate.min(), drawn.download_rate.min()
    slowest, computing = steps * drawn.seconds_per_step.max(), n * steps * drawn.seconds_per_step.mean()
    largest = data.nbytes * data.sizes.max() / data.num_examples
    present = n - round(_STRAGGLERS * n) if scenario.stragglers == "dropped" else n
    server = PLACES["data centre"]

    def paid(
        up: float, down: float, seconds: float, *, through_server: bool = False, computing: float = 0, on_server: float = 0
    ) -> Costs:
        joules = place.energy.joules(bytes_up=n * up, bytes_down=n * down, seconds=computing) + server.energy.watts * on_server
        return Costs(up, down, n * (up + down) if through_server else 0, float(seconds), float(joules))

    if way == "offloading":
        training = n * steps * server.devices.draw(["server"], rng.root(seed)).seconds_per_step[0]
        once = paid(examples, model, 2 * latency + largest / upload + model / download, through_server=True)
        return once, paid(0, 0, training, on_server=training)
    if way == "distributed":
        ring = RingAllReduce(present).cost(values)
        sent = steps * ring.worker * present / n
        once = paid(examples, examples, 2 * latency + largest / upload + examples / download, through_server=True)
        step = _slowest_step(scenario, data, drawn.seconds_per_step, seed) + ring.seconds(latency, 1 / upload)
        return once, paid(sent, sent, steps * step, computing=computing)
    if way == "federated":
        receiving = latency + model / download
        each = paid(
            model * present / n, model, receiving + slowest + latency + model / upload, through_server=True, computing=computing
        )
        return paid(0, model, receiving, through_server=True), each
    gossip = Gossip(topology(n)).cost(values)
    seconds = slowest + gossip.seconds(latency, 1 / upload)
    return paid(0, 0, 0), paid(gossip.worker, gossip.worker, seconds, computing=computing)


def _slowest_step(scenario: Scenario, data: FederatedData, seconds_per_step: np.ndarray, seed: int) -> float:
    """Returns the seconds of a step for which everyone waits who is not dropped, a mean over rounds with stragglers."""
    if not scenario.stragglers:
        return float(seconds_per_step.max())
    sampler = sampler_of("federated", scenario, data, seed)
    cohorts = (sampler.cohort(round) for round in range(scenario.rounds))
    return float(np.mean([np.max(seconds_per_step[cohort.clients] / cohort.work) for cohort in cohorts]))
