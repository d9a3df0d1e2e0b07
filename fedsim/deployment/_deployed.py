"""`Deployed`: rounds whose clients run at nodes, other processes that keep the clients' data."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.aggregators import SecureMean
from fedsim.data import Cohort, population_identity
from fedsim.deployment._encoding import decode, encode
from fedsim.deployment._node import leaves_of, versions
from fedsim.deployment._nodes import WHO, Blobs, NodeError, Nodes, Replies
from fedsim.deployment._record import Deliveries
from fedsim.execution import DividedRound, Execution, check_cohorts, remembered
from fedsim.rounds import FederatedAlgorithm, RoundInfo, State, kept_with, server_state
from fedsim.saved_arrays import checkpoint_rounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployed(Execution):
    """Runs the server's part of rounds here, and the clients at nodes.

    A client belongs to the node whose number is its position in the population modulo the number of nodes. Each node adds the
    updates of its clients, those with most steps first, and the server adds these sums in the order of the nodes. If a node
    does not answer, its clients take no step in this round, and a warning says so.

    With `fedsim.aggregators.SecureMean` the sums are masked, and a round counts for nobody if fewer than ``minimum`` of its
    clients take a step, if a node does not send its sum, or if one node alone is there of those that have clients in it.

    Attributes:
      nodes: the nodes, which run.
      folder: the run folder; its file ``deliveries.jsonl`` has a line for each round: which nodes have answered, and the time.
      name: of the run. Nodes store what clients keep in a folder with this name; their processes serve this run alone.

    Raises:
      NodeError: no node has answered, a node reports an error, or the nodes that are there have too few clients for a masked
        sum.

    Two nodes in this process:

    >>> import tempfile, fedsim, numpy as np
    >>> from fedsim.deployment import Node
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> sampler, folder = fedsim.UniformSampler(data, clients=2, seed=0), Path(tempfile.mkdtemp())
    >>> both = [Node(fedsim.algorithms.Histogram(bins=2), sampler, number, 2, folder / str(number)) for number in range(2)]
    >>> class Near(Nodes):
    ...     count = 2
    ...     def ask(self, requests):
    ...         return Replies({number: both[number].answer(blobs) for number, blobs in requests.items()}, {})
    >>> algorithm = fedsim.algorithms.Histogram(bins=2, execution=Deployed(nodes=Near(), folder=folder))
    >>> algorithm.apply(algorithm.init(jax.random.key(0)), sampler.cohort(0))[0].counts.tolist()
    [0, 1, 2, 0]
    """

    nodes: Nodes = dataclasses.field(repr=False)
    folder: Path
    name: str = dataclasses.field(default="", repr=False)
    keeps_memories: ClassVar[bool] = False
    waits: ClassVar[bool] = True

    def check(self, cohort: Cohort) -> None:
        """Compares what the nodes say of themselves with the server.

        Raises:
          NodeError: a node does not answer, has other versions of fedsim and JAX, or other data.
        """
        expected: dict[str, Any] = {"versions": versions()}
        if self.nodes.first is None:  # Otherwise the server has no examples to compare.
            expected["population"] = population_identity(cohort.data)
        expected = json.loads(json.dumps(expected))
        for number, facts in self.nodes.introductions().items():
            for name, own in expected.items():
                for what in own:
                    if (theirs := facts[name].get(what)) != own[what]:
                        raise NodeError(
                            f"Expected {what}={own[what]!r} at node {number}, as at the server, got {theirs!r}: use the same "
                            "versions and the same dataset at the server and at all nodes."
                        )

    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        infos = []
        for cohort in cohorts:
            state, info = self.run_one(algorithm, state, cohort)
            infos.append(info)
        return state, jax.tree.map(lambda *rows: jnp.stack(rows), *infos)

    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, [cohort])
        unknown = {"attackers": cohort.attack, "updates of earlier rounds": cohort.arrivals, "arriving examples": cohort.rows}
        if found := [what for what, value in unknown.items() if value is not None]:
            raise ValueError(
                f"Expected a cohort without {found[0]}, got one with them: nodes have none. Simulate it (fedsim run)."
            )
        state, key = remembered(algorithm, state, cohort.data), rng.typed(cohort.key)
        rounds = kept_with(algorithm).setdefault("divided rounds", {})
        if (cohort.slots, key.dtype) not in rounds:
            made = DividedRound(algorithm, server_state(state), cohort.data, slots=cohort.slots, key=key.dtype)
            rounds[cohort.slots, key.dtype] = made
        round = rounds[cohort.slots, key.dtype]
        sent = round.begin(state, cohort)
        shared, of_clients = leaves_of(sent.operands)
        slots_of = self.nodes.slots_of(cohort.clients)
        blob, record = encode(shared, {}), Deliveries(self.folder, cohort.round)
        asked, keys = self._asked(algorithm, cohort, slots_of)
        requests: dict[int, Blobs] = {}
        for number in asked:
            slots = slots_of[number]
            own = [leaf[slots] for leaf in of_clients] + ([] if cohort.work is None else [cohort.work[slots]])
            facts: dict[str, Any] = {"run": self.name, "round": cohort.round, "slots": cohort.slots}
            facts |= {"has_work": cohort.work is not None, "keys": keys}
            facts["first"] = None if self.nodes.first is None else self.nodes.first[number]
            memories = {"answered": record.answered(number), "saved": checkpoint_rounds(self.folder / "checkpoints")}
            requests[number] = {"shared": blob, "clients": encode(own, facts | memories)}
        began = time.perf_counter()
        replies, lost = self.nodes.ask(requests) if requests else Replies({}, {})
        seconds = time.perf_counter() - began
        answers, facts_of = {}, {}
        for number, reply in replies.items():
            leaves, facts_of[number] = decode(reply)
            if "error" in facts_of[number]:
                raise NodeError(f"Node {number}: {facts_of[number]['error']}")
            if "withheld" in facts_of[number]:
                lost = lost | {number: facts_of[number]["withheld"]}
            else:
                answers[number] = round.answer_of(leaves)
        for number, reason in lost.items():
            what = "sent no sum" if number in replies else "did not answer"
            warnings.warn(
                f"Node {number} {what} in round {cohort.round + 1}, because {reason}: the updates of its "
                f"{len(slots_of[number])} clients do not count.",
                stacklevel=2,
            )
        if requests and not replies:
            raise NodeError(
                f"No node has answered in round {cohort.round + 1}: {next(iter(lost.values()))}. The rounds before are saved: "
                "fedsim resume FOLDER starts the nodes again."
            )
        if answers and (missing := [number for number in keys if number in lost]):
            warnings.warn(
                f"No update counts in round {cohort.round + 1}, because the masks of the other nodes do not cancel without the "
                f"sum of node {missing[0]}.",
                stacklevel=2,
            )
            lost, answers = lost | dict.fromkeys(answers, f"the sum is masked without node {missing[0]}"), {}
        of_nodes = {number: facts["seconds"] for number, facts in facts_of.items()}
        record.write(self.nodes, answers, lost, seconds, of_nodes, requests, replies)
        return round.end(state, cohort, sent, answers, slots_of)

    def _asked(
        self, algorithm: FederatedAlgorithm, cohort: Cohort, slots_of: Sequence[np.ndarray]
    ) -> tuple[list[int], dict[int, str]]:
        """Returns the nodes that are asked for their sums, and if these are masked, the public keys of those that are there.

        No node is asked if the server would see a masked sum of too few clients, or a sum without a mask.

        Raises:
          NodeError: the nodes that are there have too few clients.
        """
        asked = [number for number, slots in enumerate(slots_of) if len(slots)]
        if not isinstance(aggregator := algorithm.aggregator.innermost, SecureMean):
            return asked, {}
        there = [number for number in asked if self.nodes.is_there(number)]
        least, counts, round, reason = aggregator.minimum, cohort.num_steps(algorithm.batches) > 0, cohort.round + 1, ""
        if (count := int(counts.sum())) < least:
            reason = f"{count} of its clients take a step, and the sum of fewer than minimum={least} is not revealed"
        elif (count := sum(int(counts[slots_of[number]].sum()) for number in there)) < least:
            raise NodeError(
                f"Expected at least {least} clients of round {round} at nodes that are there, got {count}: the sum of fewer is "
                "not revealed. The rounds before are saved: fedsim resume FOLDER starts the nodes again."
            )
        elif len(there) == 1 < len(asked):
            reason = f"of the nodes that have its clients only node {there[0]} is there, and its sum would have no mask"
            self.nodes.ask({there[0]: WHO})  # A round takes as long as a message, so that the other nodes may come back.
        if reason:
            warnings.warn(f"No update counts in round {round}, because {reason}.", stacklevel=3)
            return [], {}
        introductions = self.nodes.introductions()
        return asked, {number: introductions[number]["key"] for number in there}
