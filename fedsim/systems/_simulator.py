"""The schedule of a run: which update is aggregated when, and which version of the model it started from.

Durations depend on sizes, speeds and random draws and never on the values of models. So the host simulates the events
beforehand, with a queue ordered by time (ties: timers last, and otherwise by the order in which they were caused), and a
compiled program can follow it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.data import Cohort
from fedsim.descriptions import hash_of, text_of
from fedsim.samplers import Observation, Sampler, checked_cohort, is_steered
from fedsim.systems._devices import Devices
from fedsim.systems._dispatch import Clients, Policy
from fedsim.systems._faults import Faults, FaultSchedule
from fedsim.systems._records import Schedule
from fedsim.systems._server import Server, Synchronization
from fedsim.systems._synchronization import Synchronous


class Simulator:
    """Simulates the events of a run, some server steps at a time.

    Args:
      sampler: selects the clients: the clients of its cohorts, one cohort after the other, as far as they are available.
      steps: ``int [population]``, the local steps of each client. A cohort's ``work`` reduces them.
      synchronization: the synchronization model; None: synchronous rounds.
      devices: the clients' devices; None: one second per step, and messages take no time.
      faults: what goes wrong; None: nothing does.
      policy: what is done when there is no answer.
      bytes_down, bytes_up: the sizes of the model that is sent to a client and of the update that it sends.
      key: the run's root key; None: that of the sampler.

    Guarantees:
      - Equal arguments give equal schedules. Calls of `advance`, and `state` and `restore` between them, do not change them.
      - The memory is O(population), and O(server steps) of one call of `advance`.

    Raises:
      ValueError: ``steps`` is not one whole number per client; a size is negative; a client is missing in the traces; the
        synchronization model is not possible with these clients (it is named, with the remedy).

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    >>> simulator = Simulator(
    ...     fedsim.UniformSampler(data, clients=10, seed=0),
    ...     steps=np.full(100, 5),
    ...     synchronization=fedsim.systems.Buffered(size=10, concurrency=30),
    ...     devices=Devices(seconds_per_step=fedsim.systems.LogNormal(sigma=1.0)),
    ... )
    >>> first = simulator.advance(10)  # server steps 0 to 9
    >>> second = simulator.advance(20)
    >>> len(second.updates.client), second.totals.aggregated
    (100, 200)
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        steps: np.ndarray,
        synchronization: Synchronization | None = None,
        devices: Devices | None = None,
        faults: Faults | FaultSchedule | None = None,
        policy: Policy | None = None,
        bytes_down: int = 0,
        bytes_up: int = 0,
        key: jax.Array | None = None,
    ) -> None:
        checks.whole(0, bytes_down=bytes_down, bytes_up=bytes_up)
        checks.instance(Synchronization, "Synchronous()", or_none=True, synchronization=synchronization)
        checks.instance(Devices, "Devices(seconds_per_step=LogNormal())", or_none=True, devices=devices)
        if not isinstance(faults, Faults | FaultSchedule | None):
            checks.instance(Faults, "Faults(message_loss=0.1), or of FaultSchedule", faults=faults)
        checks.instance(Policy, "Policy(timeout=60.0)", or_none=True, policy=policy)
        cohort = checked_cohort(sampler, 0)
        if cohort.arrivals is not None:
            raise ValueError(
                f"Expected a sampler that does not weight its clients for a virtual clock, got {type(sampler).__name__}: use "
                "fedsim.UniformSampler, for example, or run without a clock."
            )
        if cohort.rows is not None:
            raise ValueError(
                "Expected a sampler whose clients have all of their examples, got examples that arrive by round: on a virtual "
                "clock they have no time. Use the sampler without Arriving."
            )
        population = cohort.data.num_clients
        steps = np.asarray(steps)
        if steps.shape != (population,) or steps.dtype.kind not in "iu" or steps.min() < 0:
            raise ValueError(
                f"Expected steps [{population}], a whole number of at least 0 for each client, got {steps.dtype} "
                f"{list(steps.shape)}: give batches.num_steps(data.sizes), for example."
            )
        faults, policy, devices = faults or FaultSchedule(), policy or Policy(), devices or Devices()
        key = cohort.key if key is None else key
        drawn = devices.draw(cohort.data.client_ids, key)
        unreachable = [*faults.outages, *faults.server_crashes]
        clients = Clients(drawn, faults.draw(key), unreachable, policy, bytes_down, bytes_up)
        self._model = synchronization or Synchronous()
        if is_steered(sampler):
            self._check_steered(sampler, cohort, policy)
        # How much less than all of their steps the clients of later cohorts take is not known.
        least_steps = steps if cohort.work is None else np.zeros_like(steps)
        fastest = drawn.fastest(least_steps, bytes_down, bytes_up)
        self._model.check(clients=population, cohort=cohort.slots, fastest=fastest)
        if policy.timeout is not None and policy.timeout < fastest:
            raise ValueError(
                f"Expected timeout >= {fastest!r} seconds, in which the fastest client answers, got timeout="
                f"{policy.timeout}: every update would be late; give a longer timeout, or faster devices."
            )
        if isinstance(faults, Faults) and faults.client_failures == 1:
            raise ValueError(
                "The run cannot go on after 0 server steps, with client_failures=1: every client fails, so no update would "
                "ever arrive: give fewer faults."
            )
        self._slots = cohort.slots
        self._server = Server(sampler, steps.astype(np.int64), clients, policy, faults.server_crashes)
        self._begun = False
        self._arguments = {
            "sampler": (type(sampler).__name__, cohort.clients),
            "steps": steps,
            "synchronization": self._model,
            "devices": devices,
            "faults": faults,
            "policy": policy,
            "bytes_down": bytes_down,
            "bytes_up": bytes_up,
            "key": key,
        }

    def _check_steered(self, sampler: Sampler, cohort: Cohort, policy: Policy) -> None:
        """Raises ``ValueError`` unless values of a server step can be known before clients are selected for the next one."""
        name, model = type(sampler).__name__, type(self._model).__name__
        if type(self._model) is not Synchronous or policy.late != "drop":
            raise ValueError(
                f"Expected Synchronous() and Policy(late='drop') for {name}, whose cohorts depend on values of the rounds "
                f"before, got {model} and late={policy.late!r}: use these, or a sampler such as fedsim.UniformSampler."
            )
        if cohort.work is not None or cohort.attack is not None:
            raise ValueError(
                f"Expected {name} to select neither stragglers nor attackers on a virtual clock, because values of the rounds "
                "before steer it: leave them out, or use a sampler such as fedsim.UniformSampler."
            )

    @property
    def most_updates(self) -> int:
        """The largest number of updates in a server step of synchronous rounds without late updates."""
        assert isinstance(self._model, Synchronous)
        return self._model.most_updates(self._slots)

    def observe(self, observation: Observation) -> None:
        """Gives a sampler that values steer those of the last server step; it must be called after each one."""
        self._server.observe(self._model, observation)

    def advance(self, until: int, seconds: float = math.inf) -> Schedule:
        """Simulates until the server has taken ``until`` steps in all, and returns what happened since the last call.

        Args:
          until: the number of server steps since the start.
          seconds: the simulated time at which it stops nevertheless.

        Raises:
          ValueError: the run cannot go on; the message says why.
        """
        checks.whole(0, until=until)
        server = self._server
        if not self._begun:
            self._begun = True
            self._model.begin(server)
        if (unknown := server.steps_to_observe) is not None and until - server.version + unknown > 1:
            raise ValueError(
                f"Expected until <= {server.version + 1 - unknown}, because values of each server step steer the sampler, got "
                f"until={until}: use fedsim.systems.ClockedSampler, or call observe after each server step."
            )
        while server.version < until and server.next_time <= seconds:
            server.next_event(self._model)
        return dataclasses.replace(server.schedule(), arguments=self._texts)

    def state(self) -> dict[str, Any]:
        """Returns the state between two calls of `advance`: numbers, strings, lists and dicts, which JSON can represent."""
        if self._server.steps_to_observe is not None:
            raise ValueError("Expected a sampler that no values steer, got one whose state is its observations: keep these.")
        return {"begun": self._begun, "server": self._server.state(), "arguments": self._descriptions}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of a simulator that was made with equal arguments.

        Raises:
          ValueError: it was made with other arguments, which are named. Functions in arguments are not compared, nor are the
            cohorts of the sampler after the first one.
        """
        if others := [name for name, text in self._descriptions.items() if state["arguments"].get(name) != text]:
            raise ValueError(
                f"Expected the state of a simulator with equal arguments, got one with other {', '.join(others)}: make the "
                "simulator with the same arguments as the one that was saved."
            )
        self._begun = state["begun"]
        self._server.restore(state["server"])

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        """A text of each argument."""
        return {name: text_of(value) or type(value).__name__ for name, value in self._arguments.items()}

    @property
    def _descriptions(self) -> dict[str, str]:
        """A hash of each argument."""
        return {name: hash_of(text.encode()) for name, text in self._texts.items()}


def schedule(sampler: Sampler, rounds: int, *, seconds: float | None = None, **arguments: Any) -> Schedule:
    """Returns the schedule of a run of ``rounds`` server steps.

    Args:
      sampler: selects the clients.
      rounds: the number of server steps.
      seconds: the simulated time at which the run ends, if it has fewer steps until then.
      **arguments: those of `Simulator`.

    Raises:
      ValueError: as `Simulator` does; ``rounds`` or ``seconds`` is not positive; the run cannot go on; the server takes no step
        within ``seconds``.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> schedule(sampler, 3, steps=np.full(4, 10)).steps.time
    array([10., 20., 30.])
    """
    checks.whole(1, rounds=rounds)
    checks.positive(or_none=True, seconds=seconds)
    simulator = Simulator(sampler, **arguments)
    found = simulator.advance(rounds, math.inf if seconds is None else seconds)
    if not len(found.steps.time):
        first = simulator.advance(1).seconds
        raise ValueError(f"Expected seconds >= {first:.6g}, the time of the first server step, got seconds={seconds}.")
    return found
