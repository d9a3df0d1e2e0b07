"""The schedule of a run: which update is aggregated when, and which version of the model it started from.

Durations depend on sizes, speeds and random draws and never on the values of models. So the host simulates the events
beforehand, with a queue ordered by time (ties: by the order in which they were caused), and a compiled program can follow
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import checks
from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort
from fedsim.systems._devices import Devices
from fedsim.systems._dispatch import Clients, Policy
from fedsim.systems._faults import Faults, FaultSchedule
from fedsim.systems._server import OUTCOMES, Server, ServerSteps, Timeline, Updates
from fedsim.systems._synchronization import Synchronization, Synchronous

# So many losses, late updates, timers and so on without a server step in between mean that the run does not go on.
_MOST_IDLE_EVENTS = 10_000


class Totals(NamedTuple):
    """What happened since the start of the run. ``dispatched`` is the sum of the six numbers after it.

    Messages, bytes and steps are those of the dispatches whose outcome is known: aggregated, late, lost or dropped.

    Attributes:
      dispatched: the models that were sent to clients.
      aggregated: the updates that were aggregated.
      late: the updates that arrived after the server had stopped waiting for them, and were not used.
      lost: the dispatches of which no update came.
      dropped: the updates that the synchronization model dropped.
      buffered: the updates that were received and are not yet aggregated.
      in_flight: the dispatches without an answer so far.
      downloads, uploads: the messages that were sent, including those that were repeated or doubled.
      bytes_down, bytes_up: their bytes.
      messages_lost: the messages that were lost.
      messages_doubled: the second copies of messages, which the receiver ignored.
      steps: the local steps that clients took.
      steps_wasted: those for updates that were not aggregated.
    """

    dispatched: int
    aggregated: int
    late: int
    lost: int
    dropped: int
    buffered: int
    in_flight: int
    downloads: int
    uploads: int
    bytes_down: int
    bytes_up: int
    messages_lost: int
    messages_doubled: int
    steps: int
    steps_wasted: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The events of a stretch of server steps.

    Attributes:
      updates: the updates that were aggregated in these server steps.
      steps: the server steps.
      timeline: the dispatches whose outcome became known.
      totals: the counts at the end, since the start of the run.
      seconds: the time at the end.
    """

    updates: Updates
    steps: ServerSteps
    timeline: Timeline
    totals: Totals
    seconds: float

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of an update: one less than the number of versions that must be kept."""
        return int(self.updates.staleness.max(initial=0))


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
        cohort = checked_cohort(sampler, 0)
        population = cohort.data.num_clients
        steps = np.asarray(steps)
        if steps.shape != (population,) or steps.dtype.kind not in "iu" or steps.min() < 0:
            raise ValueError(
                f"Expected steps [{population}], a whole number of at least 0 for each client, got {steps.dtype} "
                f"{list(steps.shape)}: give batches.num_steps(data.sizes), for example."
            )
        faults, policy = faults or FaultSchedule(), policy or Policy()
        key = cohort.key if key is None else key
        drawn = (devices or Devices()).draw(cohort.data.client_ids, key)
        unreachable = [*faults.outages, *faults.server_crashes]
        clients = Clients(drawn, faults.draw(key), unreachable, policy, bytes_down, bytes_up)
        self._model = synchronization or Synchronous()
        fastest = drawn.fastest(steps, bytes_down, bytes_up)
        self._model.check(clients=population, cohort=cohort.slots, fastest=fastest)
        self._server = Server(sampler, clients, steps.astype(np.int64), policy, faults.server_crashes)
        self._bytes, self._population, self._begun = (int(bytes_down), int(bytes_up)), population, False

    def advance(self, until: int) -> Schedule:
        """Simulates until the server has taken ``until`` steps in all, and returns what happened since the last call.

        Raises:
          ValueError: the run cannot go on; the message says why.
        """
        checks.whole(0, until=until)
        server = self._server
        if not self._begun:
            self._begun = True
            self._model.begin(server)
        while server.version < until:
            if not server.events or server.idle_events > _MOST_IDLE_EVENTS + 10 * server.expected:
                raise ValueError(self._why_it_cannot_go_on())
            self._next_event()
        updates, steps, timeline = server.take_rows()
        return Schedule(updates, steps, timeline, self._totals(), server.now)

    def state(self) -> dict[str, Any]:
        """Returns the state between two calls of `advance`: numbers, strings, lists and dicts, which JSON can represent."""
        return {"begun": self._begun, "server": self._server.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of a simulator that was made with equal arguments."""
        self._begun = state["begun"]
        self._server.restore(state["server"])

    def _next_event(self) -> None:
        server, model = self._server, self._model
        kind, payload = server.next_event()
        server.idle_events += 1
        if kind == "timer":
            model.timer(server, payload)
        elif kind == "arrival" and payload in server.in_flight:
            update = server.in_flight.pop(payload)
            server.buffer.append(update)
            server.idle_events -= 1
            model.received(server, update)
        elif kind == "arrival" and payload in server.given_up:
            update = server.given_up.pop(payload)
            if server.policy.late == "use":
                server.buffer.append(update)
            else:
                server.settle(update, "late")
        elif kind == "loss" and payload in server.in_flight:
            dispatch = server.in_flight.pop(payload)
            server.settle(dispatch, "lost")
            model.lost(server, dispatch)
        elif kind == "loss":
            server.settle(server.given_up.pop(payload), "lost")
        elif kind == "timeout" and payload in server.in_flight:
            server.given_up[payload] = dispatch = server.in_flight.pop(payload)
            model.lost(server, dispatch)
        # Otherwise the update has arrived before: it is a second copy.
        server.fill()

    def _totals(self) -> Totals:
        server, (bytes_down, bytes_up) = self._server, self._bytes
        counts = server.counts
        return Totals(
            dispatched=server.dispatched,
            buffered=len(server.buffer),
            in_flight=len(server.in_flight) + len(server.given_up),
            bytes_down=counts["downloads"] * bytes_down,
            bytes_up=counts["uploads"] * bytes_up,
            **counts,
        )

    def _why_it_cannot_go_on(self) -> str:
        server = self._server
        outcomes = ", ".join(f"{server.counts[outcome]} {outcome}" for outcome in OUTCOMES)
        what = (
            f"The run cannot go on after {server.version} server steps, at {server.now:.6g} seconds: of {server.dispatched} "
            f"dispatches, {outcomes}, {len(server.buffer)} in the buffer and {server.expected} expected. "
        )
        gone = server.clients_gone()
        if server.events:
            return what + (
                f"Since the last server step, {server.idle_events} losses, late updates and other events have brought it no "
                "nearer: give a later deadline or timeout, a smaller minimum, or fewer faults."
            )
        if server.waiting:
            return what + (
                f"No client will ever be available ({gone} of {self._population} clients have failed or gone offline for "
                "good): give Faults(recovery=...), fewer failures, or traces with a period."
            )
        return what + (
            f"{type(self._model).__name__} waits for nothing: it must dispatch clients, or set a timer with server.call_at."
        )


def schedule(sampler: Sampler, rounds: int, **arguments: Any) -> Schedule:
    """Returns the schedule of a run of ``rounds`` server steps.

    Args:
      sampler: selects the clients.
      rounds: the number of server steps.
      **arguments: those of `Simulator`.

    Raises:
      ValueError: as `Simulator` does; ``rounds`` is not positive; the run cannot go on.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> schedule(sampler, 3, steps=np.full(4, 10)).steps.time
    array([10., 20., 30.])
    """
    checks.whole(1, rounds=rounds)
    return Simulator(sampler, **arguments).advance(rounds)
