"""`run_round`: the interface between what a client does and how it is run, with a second implementation: a process pool."""

import concurrent.futures
import dataclasses
import multiprocessing

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim.execution import Execution, federated_round, run_round


def run_exported(program, leaves):
    """Runs one client in another process, which has no code of the algorithm."""
    return [np.asarray(x) for x in jax.export.deserialize(program).call(*leaves)]


@dataclasses.dataclass(frozen=True)
class Processes(Execution):
    """Every client in one of the processes of a pool."""

    pool: concurrent.futures.Executor

    def run_one(self, algorithm, state, cohort):
        return run_round(algorithm, state, cohort, self._run_clients)

    def run(self, algorithm, state, cohorts, *, max_rounds=None):
        infos = []
        for cohort in cohorts:
            state, info = self.run_one(algorithm, state, cohort)
            infos.append(info)
        return state, jax.tree.map(lambda *rows: np.stack(rows), *infos)

    def _run_clients(self, work, shared, clients):
        structure = jax.tree.structure((shared, clients[0]))

        def flat(*leaves):
            return jax.tree.leaves(work(*jax.tree.unflatten(structure, leaves)))

        leaves = [[np.asarray(x) for x in jax.tree.leaves((shared, client))] for client in clients]
        program = jax.export.export(jax.jit(flat))(*leaves[0]).serialize()
        results = self.pool.map(run_exported, [program] * len(clients), leaves)
        after = jax.tree.structure(jax.eval_shape(work, shared, clients[0]))
        return [jax.tree.unflatten(after, result) for result in results]


@pytest.fixture(scope="module")
def pool():
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("cls", [fedsim.algorithms.FedAvg, fedsim.algorithms.SCAFFOLD, fedsim.algorithms.Mime])
def test_a_process_pool_gives_the_result_of_compiled_rounds(cls, pool):
    """SCAFFOLD keeps a memory on every client, and Mime has two calls in a round."""
    compressed = fedsim.aggregators.Compressed(fedsim.compressors.QSGD())
    algorithm = cls(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        execution=fedsim.Jit(),
        **({"aggregator": compressed} if cls is fedsim.algorithms.FedAvg else {}),
    )
    elsewhere = dataclasses.replace(algorithm, execution=Processes(pool))
    start, states = algorithm.init(jax.random.key(0)), []
    for each in (algorithm, elsewhere):
        state, infos = start, []
        for round in range(2):
            state, info = each.apply(state, federation.cohort(round=round))
            infos.append(jax.device_get(info))
        states.append((federation.plain(state), infos))
    federation.assert_trees_close(*states)


@pytest.mark.parametrize("results", [2, 4])
def test_a_result_too_few_or_too_many_is_refused(results):
    data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[1, 1, 1])
    algorithm, cohort = fedsim.algorithms.Histogram(bins=2), fedsim.Cohort.of(data, ["0", "1", "2"])

    def wrong(work, shared, clients):
        return [work(shared, client) for client in [*clients, clients[0]][:results]]

    with pytest.raises(ValueError, match=f"results of 3 clients, in their order, got {results}"):
        run_round(algorithm, algorithm.init(jax.random.key(0)), cohort, wrong)


@pytest.mark.parametrize("memory", ["stream", "resident"])
def test_the_federated_program_continues_from_the_memories_of_a_state(memory):
    """A client of each round is new, so that some clients are seen in the second round and some are not."""
    data = fedsim.datasets.load("digits(clients=5)").train
    algorithm = fedsim.algorithms.SCAFFOLD(
        model=fedsim.models.digits_logistic(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=50),
        execution=fedsim.Jit(memory=memory),
    )
    ids = data.client_ids
    first, second = fedsim.Cohort.of(data, ids[:3]), fedsim.Cohort.of(data, [ids[3], ids[0], ids[2]], round=1)
    state = algorithm.apply(algorithm.init(jax.random.key(0)), first)[0]
    expected = algorithm.apply(state, second)[0]
    program, arguments = federated_round(algorithm, state, second)
    after, _, memories = program(*arguments)
    federation.assert_trees_close(after.server, expected.server, rtol=1e-6, atol=1e-6)
    table = federation.plain(expected).clients
    rows = jax.tree.map(lambda x: np.asarray(x)[second.clients], table)
    federation.assert_trees_close(tuple(memories.stacked), tuple(rows), rtol=1e-6, atol=1e-6)
