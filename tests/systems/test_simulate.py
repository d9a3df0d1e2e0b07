"""Training on a virtual clock, against a loop over the schedule and against synchronous rounds."""

import dataclasses
import os
from pathlib import Path

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import systems
from fedsim.configuration import scheduled
from fedsim.experiment import simulate
from fedsim.rounds._staleness import is_scalable

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "femnist"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")
SPEEDS = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0))


def make(**changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4)} | changes
    return fedsim.algorithms.FedAvg(**settings, execution=fedsim.Jit())


def sampler(clients=4, seed=0):
    return fedsim.UniformSampler(federation.data((7, 4, 3, 12, 1, 5, 9, 2)), clients=clients, seed=seed)


def run(algorithm=None, clients=4, seed=0, **options):
    return simulate(algorithm or make(), sampler(clients, seed), progress=False, **{"rounds": 8, "devices": SPEEDS} | options)


def params_by_hand(schedule, mixing, seed=0):
    """Computes every server step from rounds of a single client each."""
    algorithm, data, key = make(), sampler().data, fedsim.rng.root(seed)
    states = [algorithm.init(fedsim.rng.stream(key, "init"))]
    updates = schedule.updates
    for step in range(len(schedule.steps.time)):
        now, total, weights = states[-1], 0.0, 0.0
        for i in np.flatnonzero(updates.step == step):
            client, start = int(updates.client[i]), states[updates.version[i]]
            alone = fedsim.Cohort(data, np.array([client]), int(updates.round[i]), key)
            end = algorithm.apply(start, alone)[0].params
            movement = jax.tree.map(np.subtract, now.params if mixing else start.params, end)
            weight = float(data.sizes[client]) * updates.weight[i]
            scaled = jax.tree.map(lambda x, w=weight * updates.scale[i]: w * x, movement)
            total = scaled if isinstance(total, float) else jax.tree.map(np.add, total, scaled)
            weights += weight
        params = jax.tree.map(lambda p, x, w=weights: np.float32(p - x / w), now.params, total)
        states.append(now._replace(params=params, round=now.round + 1))
    return states[-1].params


@pytest.mark.slow
@pytest.mark.parametrize(("weighting", "kind"), [("uniform", systems.Buffered), ("examples", systems.FedBuff)])
def test_fedbuff_is_the_mean_over_k_with_uniform_weighting(weighting, kind):
    """Line 11 of the paper's Algorithm 1: the update of a server step is 1/K times the sum of s(staleness) times update."""
    algorithm, start = make(weighting=weighting), make().init(fedsim.rng.stream(fedsim.rng.root(0), "init"))
    result = run(algorithm, synchronization=kind(size=3, concurrency=5), rounds=2)
    updates, data = result.schedule.updates, sampler().data
    states = [start]
    for step in range(2):
        total = jax.tree.map(np.zeros_like, start.params)
        for i in np.flatnonzero(updates.step == step):
            cohort = fedsim.Cohort(data, updates.client[i : i + 1], int(updates.round[i]), fedsim.rng.root(0))
            before = states[updates.version[i]]
            after = make().apply(before, cohort)[0]
            share = 1 / np.sqrt(1 + step - updates.version[i]) / 3
            total = jax.tree.map(lambda t, a, b, s=share: t + np.float32(s) * (a - b), total, after.params, before.params)
        params = jax.tree.map(np.add, states[-1].params, total)
        states.append(states[-1]._replace(params=params, round=states[-1].round + 1))
    assert (updates.version == 0).sum() > 3  # the second step has a stale update
    federation.assert_trees_close(result.state.server.params, states[-1].params)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "synchronization",
    [
        systems.Buffered(size=2, concurrency=4),
        systems.Asynchronous(concurrency=3, staleness_weight=systems.PolynomialWeight(0.5)),
        systems.StaleSynchronous(bound=1),
    ],
)
def test_every_client_trains_from_the_version_that_it_was_sent(synchronization):
    result = run(synchronization=synchronization)
    assert result.schedule.largest_staleness > 0
    expected = params_by_hand(result.schedule, isinstance(synchronization, systems.Asynchronous))
    federation.assert_trees_close(result.state.server.params, expected)
    assert [line["simulated_seconds"] for line in result.history] == result.schedule.steps.time.tolist()
    largest = [result.schedule.updates.staleness[result.schedule.updates.step == r].max() for r in range(8)]
    assert [line["largest_staleness"] for line in result.history] == largest


@pytest.mark.first(1)
@pytest.mark.parametrize("synchronization", [systems.StaleSynchronous(bound=0), systems.Synchronous()])
def test_without_staleness_the_rounds_are_those_of_run(synchronization):
    whole = sampler(clients=8)  # all clients, so that stale synchronous workers are those of every round
    result = simulate(make(), whole, rounds=4, devices=SPEEDS, synchronization=synchronization, progress=False)
    plain = fedsim.experiment.run(make(), whole, rounds=4, progress=False)
    federation.assert_trees_close(result.state.server.params, plain.state.params)
    assert result.schedule.largest_staleness == 0


def test_stragglers_and_attackers_stay_what_their_sampler_made_them():
    slow = fedsim.samplers.Stragglers(sampler(), fraction=0.5, epochs=4)
    attacked = fedsim.samplers.Attacked(slow, fedsim.attacks.SignFlip(), fraction=0.25, seed=0)
    algorithm = make(batches=fedsim.Batches(size=4, epochs=4))
    result = simulate(
        algorithm, attacked, rounds=6, devices=SPEEDS, synchronization=systems.Buffered(size=2, concurrency=4), progress=False
    )
    planned = systems.ScheduledSampler(attacked, result.schedule)
    for cohort in planned.rounds(6):
        for place, number in enumerate(cohort.arrivals.key_rounds):
            original = attacked.cohort(int(number))
            (at,) = np.flatnonzero(original.clients == cohort.clients[place])
            assert cohort.attackers[place] == original.attackers[at]
            assert (1.0 if cohort.work is None else cohort.work[place]) == original.work[at]


REFUSED = ("SCAFFOLD", "FedDyn", "FedNova", "QFedAvg", "AdaptiveFedProx")


@pytest.mark.first(4)
@pytest.mark.parametrize("name", [*REFUSED, "FedProx", "Ditto", "PFedMe", "APFL", "FedPer", "HypCluster", "FedSGD"])
def test_scales_are_refused_where_half_an_update_is_not_half_a_step(name):
    """The server moves half as far if all updates are halved, or the algorithm says that they cannot be."""
    cls = getattr(fedsim.algorithms, name)
    settings = {
        "model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4),
        "head": lambda module, name: name == "b", "staleness": fedsim.Staleness(0), "execution": fedsim.Jit(),
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(cls)}
    algorithm = cls(**{key: value for key, value in settings.items() if key in fields})
    data, key = federation.data(), fedsim.rng.root(0)
    start = algorithm.with_memory(algorithm.init(jax.random.key(0)), data)

    def movement(scale):
        arrivals = fedsim.data.Arrivals.of([0, 0], round=0, scales=[scale, scale])
        state, _ = algorithm.apply(start, fedsim.Cohort(data, np.array([0, 3]), 0, key, arrivals=arrivals))
        return np.concatenate(
            [
                np.ravel(a - b)
                for a, b in zip(jax.tree.leaves(state.server.params), jax.tree.leaves(start.server.params), strict=True)
            ]
        )

    if not algorithm.capabilities.scalable:
        with pytest.raises(ValueError, match="cannot have scales other than 1"):
            movement(0.5)
    else:
        np.testing.assert_allclose(movement(0.5), movement(1.0) / 2, rtol=1e-4, atol=1e-7)
    assert algorithm.capabilities.scalable == (name not in REFUSED)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MeanOfX(fedsim.Algorithm):
    """The mean of the clients' examples, weighted by their numbers, which is no step from the state."""

    def init(self, key):
        return np.zeros(3, np.float32)

    def client_update(self, shared, client):
        def add(total, batch):
            return total + jax.numpy.sum(batch.examples["x"], axis=0, where=batch.mask[:, None])

        total = client.for_each_batch(self.batches, add, jax.numpy.zeros(3))
        size = client.num_examples.astype(np.float32)
        return fedsim.ClientUpdate(total / size, weight=size)

    def server_update(self, state, update, info):
        return update


FEDBUFF = systems.Buffered(size=2, concurrency=4)


@pytest.mark.slow
def test_updates_of_an_own_algorithm_are_not_scaled_unless_it_declares_it():
    algorithm, data = MeanOfX(batches=fedsim.Batches(size=4), execution=fedsim.Jit()), sampler().data
    with pytest.raises(ValueError, match=r"MeanOfX does not declare.*capabilities = fedsim.Capabilities\(scalable=True\)"):
        run(algorithm, synchronization=FEDBUFF)
    for model in (
        dataclasses.replace(FEDBUFF, divide_by="weights"), dataclasses.replace(FEDBUFF, staleness_weight="constant"),
        systems.StaleSynchronous(bound=1), systems.Synchronous(),
    ):  # fmt: skip
        result = run(algorithm, synchronization=model)
        updates, step = result.schedule.updates, result.schedule.updates.step == 7
        means = np.stack([data.client(int(client))["x"].mean(axis=0) for client in updates.client[step]])
        weights = data.sizes[updates.client[step]] * updates.weight[step]
        np.testing.assert_allclose(result.state.server, np.average(means, axis=0, weights=weights), rtol=1e-5)


class Mixin:
    def client_update(self, shared, client):
        return super().client_update(shared, client)


DECLARED = fedsim.Capabilities(scalable=True)


@pytest.mark.parametrize(
    ("bases", "body", "scaled"),
    [
        ((fedsim.algorithms.FedAvg,), {"client_loss": lambda self, shared, params, batch: 0.0}, True),
        ((fedsim.algorithms.FedAvg,), {"client_update": Mixin.client_update}, False),
        ((fedsim.algorithms.FedAvg,), {"server_update": Mixin.client_update, "capabilities": DECLARED}, True),
        ((Mixin, fedsim.algorithms.FedAvg), {}, False),
        ((Mixin, fedsim.algorithms.FedAvg), {"capabilities": DECLARED}, True),
        ((fedsim.algorithms.Ditto,), {"broadcast": Mixin.client_update}, False),
        ((fedsim.algorithms.SCAFFOLD,), {}, False),
        ((fedsim.algorithms.FedAvg,), {"capabilities": fedsim.Capabilities(minimizes=False)}, False),
        ((fedsim.Algorithm,), {"round": Mixin.client_update}, False),
    ],
)
def test_a_class_declares_scales_only_for_the_methods_that_it_has(bases, body, scaled):
    cls = type("Mine", bases, body)
    assert is_scalable(object.__new__(cls)) == scaled
    assert is_scalable(object.__new__(type("Child", (cls,), {}))) == scaled
    assert not is_scalable(object.__new__(type("Child", (cls,), {"round": Mixin.client_update})))


def test_every_algorithm_declares_whether_it_has_scales():
    for name, cls in fedsim.algorithms.ALGORITHMS.items():
        assert is_scalable(object.__new__(cls)) == cls.capabilities.scalable, name


def arrived(algorithm, **factors):
    arrivals = fedsim.data.Arrivals.of([0], round=0, **factors)
    cohort = fedsim.Cohort(sampler().data, np.array([0]), 0, fedsim.rng.root(0), arrivals=arrivals)
    return algorithm.apply(algorithm.init(jax.random.key(0)), cohort)


SUMS = {
    "integers": fedsim.aggregators.DistributedMechanism(0.0, clip=100.0, clients=4, minimum=2, bits=22),
    "adaptive clip": fedsim.aggregators.GaussianMechanism(0.0, clip=fedsim.aggregators.AdaptiveClip(), denominator=4),
}
MEANS = {
    "centred": fedsim.aggregators.CentredClipping(1.0),
    "normalized": fedsim.aggregators.MinNorm(),
    "trust": fedsim.aggregators.FLTrust(federation.model().init(jax.random.key(0))),
}


@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_messages_with_more_than_an_update_are_not_multiplied(name):
    algorithm = make(aggregator=(SUMS | MEANS)[name], weighting="uniform", staleness=fedsim.Staleness(0))
    with pytest.raises(ValueError, match="must not be multiplied by scales"):
        arrived(algorithm, scales=[0.5])
    with pytest.raises(ValueError, match="must not be multiplied by scales"):
        arrived(dataclasses.replace(algorithm, staleness=fedsim.Staleness(0, mixing=True)))
    if name in SUMS:
        with pytest.raises(ValueError, match="must not be multiplied by scales or weights"):
            arrived(algorithm, weights=[0.5])
    else:
        assert arrived(algorithm, weights=[0.5])[1].num_aggregated == 1


@pytest.mark.slow
def test_weights_are_refused_where_the_aggregate_is_a_sum():
    histogram = fedsim.algorithms.Histogram(low=-1.0, high=1.0, bins=2, batches=fedsim.Batches(size=4))
    with pytest.raises(ValueError, match="The updates of Histogram cannot have scales"):
        run(histogram, synchronization=dataclasses.replace(FEDBUFF, divide_by="weights"))
    arrivals = fedsim.data.Arrivals.of([0], round=0, weights=[0.5])
    cohort = fedsim.Cohort(sampler().data, np.array([0]), 0, fedsim.rng.root(0), arrivals=arrivals)
    stale = dataclasses.replace(histogram, staleness=fedsim.Staleness(0))
    with pytest.raises(ValueError, match="The updates of Histogram cannot have scales"):
        stale.apply(stale.init(jax.random.key(0)), cohort)
    result = run(histogram, synchronization=dataclasses.replace(FEDBUFF, staleness_weight="constant"))
    values = np.concatenate([sampler().data.client(int(client))["x"] for client in result.schedule.updates.client])
    np.testing.assert_array_equal(result.state.counts, np.histogram(values, [-np.inf, -1, 0, 1, np.inf])[0])


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "field"), [("SCAFFOLD", "control"), ("FedDyn", "h")])
def test_what_the_server_keeps_remains_the_mean_of_the_memories_with_staleness_weights(name, field):
    algorithm = getattr(fedsim.algorithms, name)(
        model=federation.model(), client_optimizer=optax.sgd(0.3), batches=fedsim.Batches(size=4), execution=fedsim.Jit()
    )
    result = run(algorithm, rounds=12, synchronization=systems.Buffered(size=2, concurrency=4, divide_by="weights"))
    assert result.schedule.updates.weight.min() < 0.8
    memories, _ = result.state.clients.rows
    mean = jax.tree.map(lambda rows: np.sum(rows, 0) / 8, memories)  # clients that did not take part have zeros
    federation.assert_trees_close(getattr(result.state.server, field), mean)


def test_replacements_of_lost_workers_train_too():
    result = run(synchronization=systems.StaleSynchronous(bound=1), faults=systems.Faults(message_loss=0.2), clients=3)
    assert result.round == 8 and result.schedule.totals.lost > 0
    slow = fedsim.samplers.Stragglers(sampler(), fraction=0.5, epochs=4)
    with pytest.raises(ValueError, match="StaleSynchronous has the same workers"):
        simulate(make(), slow, rounds=3, synchronization=systems.StaleSynchronous(bound=1), progress=False)


@pytest.mark.slow
def test_a_plan_estimates_the_time_of_a_simulation():
    made = scheduled(
        make(), sampler(), rounds=5, synchronization=systems.Buffered(size=2, concurrency=4), devices=SPEEDS, faults=None
    )
    assert fedsim.plan(made.algorithm, made.sampler.cohort(4)).seconds > 0


@pytest.mark.slow
def test_an_interrupted_simulation_goes_on_to_the_same_bits(tmp_path):
    options = {"synchronization": systems.Buffered(size=2, concurrency=4), "checkpoint_every": 2}
    unbroken = run(**options, folder=tmp_path / "unbroken")

    class StopError(Exception):
        pass

    def stop(line, state):
        if line["round"] == 5:
            raise StopError

    with pytest.raises(StopError):
        run(**options, folder=tmp_path / "stopped", callbacks=[stop])
    resumed = run(**options, folder=tmp_path / "stopped")
    for a, b in zip(*(jax.tree.leaves(federation.plain(r.state)) for r in (unbroken, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_algorithms_that_cannot_use_older_models_are_refused():
    mime = fedsim.algorithms.Mime(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    with pytest.raises(ValueError, match="Mime cannot run with staleness, or on a virtual clock"):
        run(mime)
    scaffold = fedsim.algorithms.SCAFFOLD(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4)
    )
    for synchronization in (systems.Asynchronous(concurrency=2), systems.Buffered(size=2, concurrency=4)):
        with pytest.raises(ValueError, match="SCAFFOLD cannot have scales other than 1.*divide_by='weights'"):
            run(scaffold, synchronization=synchronization)
    assert run(scaffold, synchronization=systems.Buffered(size=2, concurrency=4, divide_by="weights")).round == 8
    gradients = fedsim.algorithms.FedSGD(model=federation.model(), batches=fedsim.Batches(size=4))
    with pytest.raises(ValueError, match="Asynchronous mixes the models of clients, and those of FedSGD send none"):
        run(gradients, synchronization=systems.Asynchronous(concurrency=2))


FAULTS = systems.Faults(message_loss=0.3, client_failures=0.2, recovery=1.0, duplication=0.3, delay=systems.Exponential(3.0))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "synchronization",
    [
        systems.Synchronous(over_selection=1.5),
        systems.StaleSynchronous(bound=1),
        systems.Buffered(size=2, concurrency=4),
        systems.Asynchronous(concurrency=3),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_after_faults_the_state_is_that_of_the_delivered_updates_alone(synchronization, seed):
    """No update counts twice or half: the delivered updates, in their order and without any fault, give the same model."""
    policy = systems.Policy(late="use", retries=1)
    result = run(synchronization=synchronization, faults=FAULTS, policy=policy, seed=seed)
    totals = result.schedule.totals
    assert totals.lost > 0 and totals.messages_doubled > 0
    expected = params_by_hand(result.schedule, isinstance(synchronization, systems.Asynchronous), seed)
    federation.assert_trees_close(result.state.server.params, expected)


def test_metrics_count_messages_steps_and_clients():
    options = {"synchronization": systems.Buffered(size=2, concurrency=4), "bytes_down": 10, "bytes_up": 7}
    result = run(faults=FAULTS, policy=systems.Policy(timeout=40.0, retries=1), **options)
    total = {name: sum(line[name] for line in result.history) for name in result.history[0] if name != "staleness_counts"}
    totals = result.schedule.totals
    names = {"messages_down": "downloads", "messages_up": "uploads", "client_steps": "steps"}
    names |= {"client_steps_wasted": "steps_wasted", "updates_late": "late", "updates_lost": "lost"}
    names |= {name: name for name in ("messages_lost", "messages_doubled")}
    # The run ends with a server step, so nothing happens after its last line.
    assert {name: total[name] for name in names} == {name: getattr(totals, field) for name, field in names.items()}
    assert total["bytes_down"] == 10 * total["messages_down"] and total["bytes_up"] == 7 * total["messages_up"]
    # When a server step is taken, the client whose update has filled the buffer is not yet replaced.
    assert {line["clients_in_flight"] for line in result.history} == {3}
    updates, sizes = result.schedule.updates, np.array(sampler().data.sizes)
    useful = np.sum(-(-sizes[updates.client] // 4))  # batches of 4
    assert total["client_steps"] - total["client_steps_wasted"] == useful and total["client_steps_wasted"] > 0
    for line in result.history:
        counts = np.bincount(updates.staleness[updates.step == line["round"] - 1])
        assert line["staleness_counts"] == counts.tolist()


@pytest.mark.slow
def test_a_run_can_end_at_a_simulated_time():
    options = {"synchronization": systems.Buffered(size=2, concurrency=4)}
    whole = run(rounds=12, **options)
    times = whole.schedule.steps.time
    part = simulate(make(), sampler(), seconds=float(times[6]), devices=SPEEDS, progress=False, **options)
    assert part.round == 7 and part.schedule.steps.time.tolist() == times[:7].tolist()
    assert run(rounds=3, seconds=float(times[6]), **options).round == 3
    with pytest.raises(ValueError, match="seconds >= .*, the time of the first server step, got seconds=0.001"):
        run(seconds=0.001, **options)
    with pytest.raises(ValueError, match="rounds or seconds, got neither"):
        simulate(make(), sampler(), progress=False)


def test_the_algorithm_of_a_result_continues_its_state():
    result = run(synchronization=systems.Buffered(size=2, concurrency=4))
    state, _ = result.algorithm.apply(result.state, sampler().cohort(8))
    assert int(state.server.round) == 9


def test_a_run_whose_evaluations_are_not_finite_ends_without_a_picture_of_them(tmp_path):
    with pytest.warns(UserWarning, match="loss"):
        result = run(rounds=2, folder=tmp_path / "r", evaluate=lambda state: {"loss": float("nan")})
    assert result.round == 2 and (tmp_path / "r/timeline.png").exists()
    assert not (tmp_path / "r/progress.png").exists()


def test_a_folder_says_what_was_simulated(tmp_path):
    run(folder=tmp_path / "r", synchronization=systems.Buffered(size=2, concurrency=4), rounds=2)
    text = (tmp_path / "r/config.json").read_text()
    assert "Buffered(size=2, concurrency=4" in text and "LogNormal(sigma=1.0" in text
    with pytest.raises(ValueError, match="(?s)holds a run of another configuration.*sampler"):
        run(folder=tmp_path / "r", synchronization=systems.Buffered(size=2, concurrency=5), rounds=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": systems.LogNormal()}, "devices to be an instance of Devices"),
        ({"faults": 0.3}, "faults to be an instance of Faults.*or of FaultSchedule"),
        ({"policy": 3}, "policy to be an instance of Policy"),
    ],
)
def test_arguments_of_another_type_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def accuracy_and_seconds(splits, model, faults, **options):
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), execution=fedsim.Jit()
    )
    sampled = fedsim.UniformSampler(splits.train, clients=10, seed=0)
    result = simulate(algorithm, sampled, test_data=splits.test, devices=SPEEDS, faults=faults, progress=False, **options)
    return result.history[-1]["test_accuracy"], result.schedule.seconds


@pytest.mark.slow
@pytest.mark.parametrize("synchronization", [systems.Synchronous(over_selection=1.3), systems.Buffered(size=5, concurrency=10)])
@pytest.mark.parametrize(
    ("dataset", "rounds"),
    [("digits", 100), pytest.param("emnist62", 150, marks=[pytest.mark.slow, needs_real])],
)
def test_with_many_faults_it_learns_as_well_in_at_most_twice_the_time(dataset, rounds, synchronization):
    """30 % of the messages are lost, and 20 % of the clients die in their training."""
    splits = fedsim.datasets.load(dataset, data=str(REAL) if dataset == "emnist62" else None)
    model = fedsim.models.digits_logistic() if dataset == "digits" else fedsim.models.emnist_dense()
    faults = systems.Faults(message_loss=0.3, client_failures=0.2, recovery=10.0)
    options = {"synchronization": synchronization, "rounds": rounds, "evaluate_every": rounds}
    good, fast = accuracy_and_seconds(splits, model, None, **options)
    accuracy, seconds = accuracy_and_seconds(splits, model, faults, **options)
    assert accuracy >= 0.97 * good and good > 0.5
    assert fast < seconds <= 2 * fast
