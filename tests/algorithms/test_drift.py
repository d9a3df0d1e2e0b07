"""Drift correction against NumPy rounds in float64, written from the papers; its reduction laws; and SCAFFOLD's own theory."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, compressors, tree
from fedsim.algorithms import SCAFFOLD, AdaptiveFedProx, FedAvg, FedDyn, FedNova, FedProx, Mime, MimeLite

RATE, SERVER_RATE = 0.3, 0.7
BATCHES = fedsim.Batches(size=4, epochs=2)
ONE_STEP = fedsim.Batches(size=16, shuffle=False)


def gradient(theta, x, y):
    """Of the mean softmax cross-entropy of the linear model [x 1] theta."""
    p = np.exp(x @ theta)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y)


def with_ones(x):
    return np.concatenate([x, np.ones([len(x), 1])], axis=1).astype(np.float64)


def clients(cohort, batches=BATCHES):
    """Position, examples, and the list of batches of everybody who has examples."""
    for position, (_, dataset, key) in zip(cohort.clients.tolist(), cohort, strict=True):
        rows = [(b.examples["x"][b.mask], b.examples["y"][b.mask]) for b in dataset.batches(batches, key)]
        if rows:
            yield position, (with_ones(dataset["x"]), dataset["y"]), [(with_ones(x), y) for x, y in rows]


def settings(**more):
    return {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE)} | more


def theta(state):
    linear = state.params["linear"]
    return np.concatenate([np.asarray(linear["w"], np.float64), np.asarray(linear["b"], np.float64)[None]])


def run(algorithm, cohorts):
    """Where training starts, where it ends, and the state then."""
    state = algorithm.init(jax.random.key(1))
    start = theta(state)
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
    return start, theta(state), state


def cohorts(population=None, count=4, size=4):
    """Rounds of some of the clients: whoever keeps something comes again."""
    population = population or federation.data()
    draw = np.random.default_rng(5)
    for r in range(count):
        yield fedsim.Cohort(population, draw.permutation(population.num_clients)[:size], r, fedsim.rng.root(0))


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def assert_differ(one, other):
    assert np.abs(one - other).max() > 1e-3


# SCAFFOLD


def numpy_scaffold(x, rounds, option, weight_of, population_weight):
    """Karimireddy et al. 2020, Algorithm 1."""
    c, kept = np.zeros_like(x), {}
    for cohort in rounds:
        moves, changes, weights = [], [], []
        for i, everything, batches in clients(cohort):
            c_i, y = kept.get(i, np.zeros_like(x)), x
            for batch in batches:
                y = y - RATE * (gradient(y, *batch) - c_i + c)
            kept[i] = gradient(x, *everything) if option == "I" else c_i - c + (x - y) / (len(batches) * RATE)
            moves.append(y - x)
            changes.append(kept[i] - c_i)
            weights.append(weight_of(everything))
        x = x + SERVER_RATE * np.average(moves, axis=0, weights=weights)
        c = c + sum(weights) / population_weight * np.average(changes, axis=0, weights=weights)
    return x, c


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_follows_algorithm_1(option, weighting):
    algorithm = SCAFFOLD(option=option, weighting=weighting, **settings(server_optimizer=optax.sgd(SERVER_RATE)))
    start, end, state = run(algorithm, cohorts())
    sizes = federation.data().sizes
    weight_of, whole = (lambda _: 1, np.count_nonzero(sizes)) if weighting == "uniform" else (lambda e: len(e[1]), sizes.sum())
    x, c = numpy_scaffold(start, cohorts(), option, weight_of, whole)
    assert_close(end, x)
    assert_close(theta(type("", (), {"params": state.server.more})), c)
    # The negative control: two other cohort-to-population ratios end elsewhere.
    assert_differ(numpy_scaffold(start, cohorts(), option, weight_of, 2 * whole)[0], x)


@pytest.mark.parametrize("cls", [SCAFFOLD, FedDyn])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_what_the_server_keeps_is_the_mean_of_what_clients_keep(cls, weighting):
    population = federation.data()
    on_the_device = settings(execution=fedsim.Jit(memory="resident"))
    _, _, state = run(cls(weighting=weighting, **on_the_device), cohorts(population, 6))
    rows, seen = jax.device_get(state.clients)
    assert np.count_nonzero(seen) > 4
    weights = population.sizes if weighting == "examples" else (population.sizes > 0)
    kept = jax.tree.map(lambda row: np.where(np.reshape(seen, (-1,) + (1,) * (row.ndim - 1)), row, 0), rows[0])
    mean = jax.tree.map(lambda row: np.average(row, axis=0, weights=weights).astype(np.float32), kept)
    federation.assert_trees_close(mean, state.server.more, rtol=1e-4, atol=1e-6)


def test_scaffold_begins_as_fedavg_and_stays_it_on_equal_clients():
    first = next(cohorts())
    _, scaffold, _ = run(SCAFFOLD(**settings()), [first])
    _, fedavg, _ = run(FedAvg(weighting="uniform", **settings()), [first])
    assert_close(scaffold, fedavg)
    one = federation.data(sizes=(6,)).columns
    equal = fedsim.FederatedData.from_arrays({k: np.concatenate([v, v, v]) for k, v in one.items()}, sizes=(6, 6, 6))
    alike = settings(batches=fedsim.Batches(size=6, epochs=5, shuffle=False))
    rounds = [federation.cohort(equal, round=r) for r in range(4)]
    for option in ("I", "II"):
        assert_close(run(SCAFFOLD(option=option, **alike), rounds)[1], run(FedAvg(**alike), rounds)[1])
    unlike = [federation.cohort(round=r) for r in range(4)]
    assert_differ(run(SCAFFOLD(**settings()), unlike)[1], run(FedAvg(weighting="uniform", **settings()), unlike)[1])


def test_scaffold_s_variate_of_momentum_is_a_mean_of_gradients():
    """On a loss with the same gradient everywhere any way to average gives that gradient, and a wrong length would not."""
    model = dataclasses.replace(
        federation.model(), loss=lambda examples, outputs: outputs[:, 0] * 3.0 + jnp.zeros_like(examples["x"][:, 0])
    )
    population = federation.data(sizes=(6, 3))
    for optimizer in (optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.sgd(optax.linear_schedule(0.1, 0.02, 3), 0.5, nesterov=True)):
        algorithm = SCAFFOLD(**settings(model=model, client_optimizer=optimizer))
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
        np.testing.assert_allclose(state.server.more["linear"]["b"], [3, 0, 0, 0], rtol=1e-5)


def test_scaffold_refuses_an_optimizer_that_is_not_linear():
    for optimizer in (optax.sign_sgd(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1)), optax.polyak_sgd()):
        algorithm = SCAFFOLD(**settings(client_optimizer=optimizer))
        with pytest.raises(ValueError, match="SCAFFOLD's option II needs a client_optimizer that is linear"):
            algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    algorithm = SCAFFOLD(option="I", **settings(client_optimizer=optax.sign_sgd(0.01)))
    algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


# Two quadratics: SCAFFOLD's section 7.1, with the functions of its theorem II for mu = 1: f_1 = x^2 + G x and f_2 = -G x, so
# that f = x^2 / 2, beta = delta = 1, and G says how far apart they are. Full gradients, both clients every round, and
# c_i = g_i(x) at the start as in its theorems. It does not give its step size: 0.1 here, for everybody.

STEP, START = 0.1, 1.0


def two_quadratics(G):
    columns = {"curvature": np.array([2, 0], np.float32), "slope": np.array([G, -G], np.float32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=(1, 1))


def on_quadratics(cls, steps, **options):
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("x", [1], init=lambda *_: jnp.full([1], START))),
        features={name: jax.ShapeDtypeStruct((), jnp.float32) for name in ("curvature", "slope")},
        loss=lambda examples, x: examples["curvature"] * jnp.square(x) / 2 + examples["slope"] * x,
        metrics={},
    )
    batches = fedsim.Batches(size=1, steps=steps)
    return cls(model=model, batches=batches, client_optimizer=optax.sgd(STEP), execution=fedsim.Jit(), **options)


def curve(algorithm, G, rounds=90):
    """f after every round."""
    both = two_quadratics(G)
    state, f = algorithm.init(jax.random.key(0)), []
    if isinstance(algorithm, SCAFFOLD):
        warm, _ = dataclasses.replace(algorithm, option="I").apply(state, federation.cohort(both))
        state = warm._replace(server=warm.server._replace(params=state.params))
    for r in range(rounds):
        f.append(float(jax.tree.leaves(state.params)[0][0]) ** 2 / 2)
        state, _ = algorithm.apply(state, federation.cohort(both, round=r))
    return np.array(f)


def rounds_to(f, level=1e-6):
    return len(f) - np.argmax(np.array(f)[::-1] > level)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_on_two_quadratics_does_not_see_how_they_differ_and_gains_from_steps(option):
    sgd = rounds_to(START**2 / 2 * (1 - STEP) ** (2 * np.arange(90)))
    assert sgd == rounds_to(curve(on_quadratics(FedAvg, 1), 1, rounds=70)) == 63  # one step a client: the gradient of f
    took = {}
    for steps in (2, 10):
        algorithm = on_quadratics(SCAFFOLD, steps, option=option)
        curves = [curve(algorithm, G, rounds=36) for G in (1, 10, 100)]
        for f in curves[1:]:
            np.testing.assert_allclose(np.sqrt(f), np.sqrt(curves[0]), rtol=0, atol=5e-5)  # float32 next to G = 100
        (took[steps],) = {rounds_to(f) for f in curves}
    # The paper: 2 and 5 times faster.
    assert (took, sgd / took[2], sgd / took[10]) == ({2: 31, 10: 10}, pytest.approx(2, abs=0.1), pytest.approx(6.3, abs=0.1))


def test_fedavg_on_two_quadratics_slows_with_their_difference_and_with_steps():
    def numpy_fedavg(G, steps, rate, rounds):
        x, f = START, []
        for _ in range(rounds):
            f.append(x**2 / 2)
            y_1 = y_2 = x
            for _ in range(steps):
                y_1, y_2 = y_1 - rate * (2 * y_1 + G), y_2 + rate * G
            x = (y_1 + y_2) / 2
        return np.array(f)

    for steps in (2, 10):
        algorithm, ends = on_quadratics(FedAvg, steps), []
        for G in (1, 10, 100):
            f = curve(algorithm, G, rounds=60)
            np.testing.assert_allclose(f, numpy_fedavg(G, steps, STEP, 60), rtol=1e-4)
            ends.append(f[-1])
        assert min(ends) > 1e-3  # SGD and SCAFFOLD get to 1e-6
        assert np.allclose(np.divide(ends[1:], ends[:-1]), 100, rtol=0.02)  # the distance to the optimum grows as G
    # With the best rate for each, until a hundredth of f is left: more rounds for more G, and for more steps at the same rate
    # no better end.
    rates = 0.5 ** np.arange(1, 14)
    best = [min(rounds_to(numpy_fedavg(G, 10, rate, 5000), 0.005) for rate in rates) for G in (1, 10, 100)]
    assert best[0] < best[1] / 3 and best[1] < best[2] / 3
    assert numpy_fedavg(1, 10, STEP, 90)[-1] > 10 * numpy_fedavg(1, 2, STEP, 90)[-1]


# FedNova


def numpy_nova(x, rounds, rho, mu):
    """Wang et al. 2020, Algorithm 1, with a_i for momentum rho or for a proximal term by their closed forms."""
    for cohort in rounds:
        directions, lengths, weights = [], [], []
        for _, everything, batches in clients(cohort):
            y, velocity, K = x, 0.0, len(batches)
            for batch in batches:
                velocity = rho * velocity + gradient(y, *batch) + mu * (y - x)
                y = y - RATE * velocity
            k = np.arange(K)
            a = (1 - rho ** (K - k)) / (1 - rho) if rho else (1 - RATE * mu) ** (K - 1 - k)
            directions.append((x - y) / a.sum())
            lengths.append(a.sum())
            weights.append(len(everything[1]))
        x = x - SERVER_RATE * np.average(lengths, weights=weights) * np.average(directions, axis=0, weights=weights)
    return x


@pytest.mark.parametrize(("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.8)])
def test_fednova_follows_algorithm_1(rho, mu):
    optimizers = {"client_optimizer": optax.sgd(RATE, rho or None), "server_optimizer": optax.sgd(SERVER_RATE)}
    start, end, _ = run(FedNova(mu=mu, **settings(**optimizers)), cohorts())
    assert_close(end, numpy_nova(start, cohorts(), rho, mu))
    assert_differ(end, run(FedProx(mu=mu, **settings(**optimizers)), cohorts())[1])


def test_fednova_with_equal_steps_is_fedavg():
    equal = settings(batches=fedsim.Batches(size=3, steps=4), client_optimizer=optax.sgd(RATE, 0.9))
    assert_close(run(FedNova(**equal), cohorts())[1], run(FedAvg(**equal), cohorts())[1])
    assert_close(run(FedNova(mu=0.4, **equal), cohorts())[1], run(FedProx(mu=0.4, **equal), cohorts())[1])


def test_fednova_s_fixed_point_is_the_objective_s_and_fedavg_s_is_not():
    """Quadratics around -1 and 1, of a client that takes one step and of one that takes nine: the optimum is 0."""
    x = np.array([-1.0] + [1.0] * 9, np.float32)
    population = fedsim.FederatedData.from_arrays({"x": x}, sizes=(1, 9))
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [1], init=jnp.zeros)),
        features={"x": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, w: jnp.square(examples["x"] - w) / 2,
        metrics={},
    )
    ends = {}
    for cls in (FedNova, FedAvg):
        algorithm = cls(model=model, batches=fedsim.Batches(size=1), client_optimizer=optax.sgd(0.01), weighting="uniform")
        cohort_of = [federation.cohort(population, round=r) for r in range(300)]
        state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohort_of)
        ends[cls] = float(jax.tree.leaves(state.params)[0][0])
    assert abs(ends[FedNova]) < 0.03
    assert ends[FedAvg] > 0.75


# Mime and MimeLite


def numpy_mime(x, rounds, rho, lite):
    """Karimireddy et al. 2020 (Mime), Algorithm 1, for U(g, s) = g + rho s, V(c, s) = c + rho s."""
    s = np.zeros_like(x)
    for cohort in rounds:
        everybody = list(clients(cohort))
        weights = [len(everything[1]) for _, everything, _ in everybody]
        c = np.average([gradient(x, *everything) for _, everything, _ in everybody], axis=0, weights=weights)
        ends = []
        for _, _, batches in everybody:
            y = x
            for batch in batches:
                g = gradient(y, *batch) if lite else gradient(y, *batch) - gradient(x, *batch) + c
                y = y - RATE * (g + rho * s)
            ends.append(y)
        s = c + rho * s
        x = x + SERVER_RATE * (np.average(ends, axis=0, weights=weights) - x)
    return x


@pytest.mark.parametrize("cls", [Mime, MimeLite])
def test_mime_follows_algorithm_1(cls):
    optimizers = {"client_optimizer": optax.sgd(RATE, 0.6), "server_optimizer": optax.sgd(SERVER_RATE)}
    start, end, _ = run(cls(**settings(**optimizers)), cohorts())
    assert_close(end, numpy_mime(start, cohorts(), 0.6, cls is MimeLite))
    assert_differ(end, numpy_mime(start, cohorts(), 0.6, cls is not MimeLite))


def test_mimelite_with_sgd_is_fedavg_and_mime_is_not():
    fedavg = run(FedAvg(**settings()), cohorts())[1]
    assert_close(run(MimeLite(**settings()), cohorts())[1], fedavg)
    assert_differ(run(Mime(**settings()), cohorts())[1], fedavg)


def test_mime_of_one_client_s_whole_data_is_its_own_momentum_sgd():
    """One client, one step of all its examples a round: c is its gradient, and the server's statistics are those of SGD."""
    population = federation.data(sizes=(6,))
    rounds = [federation.cohort(population, round=r) for r in range(5)]
    for cls in (Mime, MimeLite):
        start, end, _ = run(cls(**settings(batches=ONE_STEP, client_optimizer=optax.sgd(RATE, 0.9))), rounds)
        x, velocity = start, 0.0
        for _ in rounds:
            velocity = 0.9 * velocity + gradient(x, with_ones(population.columns["x"]), population.columns["y"])
            x = x - RATE * velocity
        assert_close(end, x)


def test_mime_of_one_client_with_full_batches_is_mimelite():
    rounds = [federation.cohort(federation.data(sizes=(6,)), round=r) for r in range(3)]
    full = settings(batches=fedsim.Batches(size=6, epochs=4, shuffle=False), client_optimizer=optax.sgd(RATE, 0.6))
    assert_close(run(Mime(**full), rounds)[1], run(MimeLite(**full), rounds)[1])


@pytest.mark.parametrize("how", [fedsim.Debug(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=3)])
def test_mime_s_first_phase_sees_every_example_once_however_long_the_second_is(how, monkeypatch):
    monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)  # either phase is cut into programs of its own
    population = federation.data()
    for batches in (fedsim.Batches(size=4, steps=1), fedsim.Batches(size=4, epochs=5)):
        start, _, state = run(Mime(**settings(batches=batches, execution=how)), [federation.cohort(population)])
        c = np.concatenate([state.more.gradient["linear"]["w"], state.more.gradient["linear"]["b"][None]])
        assert_close(c, gradient(start, with_ones(population.columns["x"]), population.columns["y"]))


def first_phase(**more):
    """What Mime's first phase makes of everybody's gradients, these, and the state after a round."""
    cohort = more.pop("cohort", None) or federation.cohort(federation.data())
    start, _, state = run(Mime(**settings(**more)), [cohort])
    server = fedsim.execution.split(state).server
    sent = {i: gradient(start, *everything) for i, everything, _ in clients(cohort)}
    return joined(server.more.gradient), sent, state


def joined(params):
    return theta(type("", (), {"params": params}))


@pytest.mark.parametrize("how", [fedsim.Debug(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=3)])
def test_mime_s_first_phase_is_as_robust_as_its_aggregator(how):
    attackers = np.arange(8) % 3 == 0
    cohort = dataclasses.replace(federation.cohort(), attack=fedsim.attacks.SignFlip(5.0), attackers=attackers)
    c, sent, _ = first_phase(cohort=cohort, aggregator=aggregators.CoordinateMedian(), execution=how)
    arrived = [-5.0 * g if attackers[i] else g for i, g in sent.items()]
    assert_close(c, np.median(arrived, axis=0))
    assert_differ(c, np.mean(arrived, axis=0))


def test_mime_s_phases_keep_what_the_aggregator_keeps_apart():
    c, _, state = first_phase(aggregator=aggregators.CentredClipping(radius=0.5))
    of_gradients, of_movements = map(joined, state.aggregator)
    assert_close(of_gradients, c)
    assert_differ(of_gradients, of_movements)
    feedback = compressors.ErrorFeedback(compressors.TopK(fraction=0.25))
    _, sent, state = first_phase(aggregator=aggregators.Compressed(feedback))
    (_, (kept, _), seen), _ = federation.plain(state).clients[0]
    assert seen.tolist() == [i in sent for i in range(8)]
    for i, g in sent.items():
        left = joined(jax.tree.map(lambda rows, i=i: rows[i], kept.residual))
        assert 0 < np.count_nonzero(left) < g.size
        np.testing.assert_allclose(left[left != 0], g[left != 0], rtol=1e-4, atol=1e-6)


def test_mime_s_phases_draw_noise_of_their_own():
    noised = {"aggregator": aggregators.Noised(1.0, norm=1.0)}
    of_gradients = first_phase(**noised)[0] - first_phase()[0]
    rounds = [federation.cohort(federation.data())]
    of_movements = run(FedAvg(**settings()), rounds)[1] - run(FedAvg(**settings(**noised)), rounds)[1]
    assert 0.05 < of_gradients.std() < 0.3 and 0.05 < of_movements.std() < 0.3
    assert_differ(of_gradients, of_movements)


def test_mime_counts_the_bits_of_both_phases():
    sparse = {"aggregator": aggregators.Compressed(compressors.TopK(fraction=0.3)), "downlink": compressors.Cast()}
    cohort = federation.cohort()
    infos = {}
    for cls in (FedAvg, Mime):
        algorithm = cls(**settings(**sparse))
        state, infos[cls] = algorithm.apply(algorithm.init(jax.random.key(1)), cohort)
    parameters = tree.num_bits(state.params) // 32
    once, twice = (infos[cls].clients for cls in (FedAvg, Mime))
    for name in ("bits_up", "entropy_bits_up"):
        np.testing.assert_array_equal(twice[name], 2 * once[name])
    # The parameters twice and c once, 16 bits each, and the round twice.
    assert once["bits_down"].tolist() == [16 * parameters + 32 if size else 0 for size in cohort.data.sizes]
    assert twice["bits_down"].tolist() == [16 * 3 * parameters + 64 if size else 0 for size in cohort.data.sizes]


# FedProx with an adaptive mu


def numpy_adaptive_prox(x, rounds, mu, step, patience):
    """Li et al. 2020, appendix C.3.3, with the loss of the round's clients at the parameters that they are sent."""
    last, falls, course = np.nan, 0, []
    for cohort in rounds:
        ends, losses, weights = [], [], []
        for _, (inputs, y), batches in clients(cohort):
            p = np.exp(inputs @ x)
            losses.append(-np.log(p[np.arange(len(y)), y] / p.sum(1)).mean())
            w = x
            for batch in batches:
                w = w - RATE * (gradient(w, *batch) + mu * (w - x))
            ends.append(w)
            weights.append(len(y))
        loss, x = np.average(losses, weights=weights), np.average(ends, axis=0, weights=weights)
        falls = falls + 1 if loss < last else 0
        mu = mu + step if loss > last else mu
        if falls == patience:
            mu, falls = max(mu - step, 0), 0
        course.append(mu)
        last = loss
    return x, course


@pytest.mark.parametrize(("count", "patience"), [(4, 5), (8, 2)])
def test_adaptive_fedprox_follows_the_loss(count, patience):
    algorithm = AdaptiveFedProx(mu=0.15, patience=patience, **settings())
    rounds = list(cohorts(count=12, size=count))
    state, course = algorithm.init(jax.random.key(1)), []
    start = theta(state)
    for cohort in rounds:
        state, _ = algorithm.apply(state, cohort)
        course.append(float(state.more.mu))
    x, expected = numpy_adaptive_prox(start, rounds, 0.15, 0.1, patience)
    assert len(set(np.round(expected, 3))) >= 2  # it does move: up with few clients, down to 0 with all
    np.testing.assert_allclose(course, expected, atol=1e-6)
    assert_close(theta(state), x)


def test_fedprox_without_mu_is_fedavg_adaptive_or_not():
    fedavg = run(FedAvg(**settings()), cohorts())[1]
    assert_close(run(FedProx(mu=0.0, **settings()), cohorts())[1], fedavg)
    first = [next(cohorts())]
    assert_close(run(AdaptiveFedProx(**settings()), first)[1], run(FedAvg(**settings()), first)[1])
    assert_differ(run(FedProx(mu=0.5, **settings()), cohorts())[1], fedavg)


def test_fedprox_reports_the_loss_of_the_data_and_descends_one_that_pulls():
    """By Polyak steps, which see the value of what they descend: loss / |gradient|^2 along the gradient."""
    population, mu = federation.data(sizes=(10,)), 5.0
    batches = fedsim.Batches(size=10, epochs=2, shuffle=False)
    algorithm = FedProx(model=federation.model(), client_optimizer=optax.polyak_sgd(1.0), batches=batches, mu=mu)
    state = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(state, federation.cohort(population))
    x, y = with_ones(population.client(0)["x"]), population.client(0)["y"]
    start = theta = np.concatenate([state.params["linear"]["w"], state.params["linear"]["b"][None]]).astype(np.float64)
    losses = []
    for _ in range(2):
        logits = x @ theta
        losses.append(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))
        value, slope = losses[-1] + mu / 2 * np.sum((theta - start) ** 2), gradient(theta, x, y) + mu * (theta - start)
        theta = theta - min(1.0, value / np.sum(slope**2)) * slope
    np.testing.assert_allclose(after.params["linear"]["w"], theta[:-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(info.clients["loss"][0], np.mean(losses), rtol=1e-5)


def test_fedprox_takes_what_stragglers_have_and_fedavg_drops_them():
    """A straggler's update is FedProx's own after fewer steps; one that is dropped is not there."""
    population = federation.data(sizes=(8, 8, 8))
    work = np.array([1.0, 0.25, 1.0], np.float32)
    late = fedsim.Cohort(population, np.arange(3), 0, fedsim.rng.root(0), work=work)
    start, end, _ = run(FedProx(mu=0.3, **settings()), [late])
    ends = []
    for (_, _, batches), part in zip(clients(late), work, strict=True):
        w = start
        for batch in batches[: int(len(batches) * part)]:
            w = w - RATE * (gradient(w, *batch) + 0.3 * (w - start))
        ends.append(w)
    assert_close(end, np.mean(ends, axis=0))
    dropped = fedsim.Cohort(population, np.array([0, 2]), 0, fedsim.rng.root(0), slots=3)
    assert_close(run(FedProx(mu=0.3, **settings()), [dropped])[1], (ends[0] + ends[2]) / 2)


# FedDyn


def numpy_feddyn(x, rounds, alpha, weight_of, population_weight):
    """Acar et al. 2021, Algorithm 1, with SGD for the argmin."""
    h, kept = np.zeros_like(x), {}
    for cohort in rounds:
        moves, weights = [], []
        for k, everything, batches in clients(cohort):
            h_k, theta_k = kept.get(k, np.zeros_like(x)), x
            for batch in batches:
                theta_k = theta_k - RATE * (gradient(theta_k, *batch) - h_k + alpha * (theta_k - x))
            kept[k] = h_k - alpha * (theta_k - x)
            moves.append(theta_k - x)
            weights.append(weight_of(everything))
        h = h - alpha * np.tensordot(weights, moves, 1) / population_weight
        x = x + np.average(moves, axis=0, weights=weights) - h / alpha
    return x


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_feddyn_follows_algorithm_1(weighting):
    start, end, _ = run(FedDyn(alpha=0.2, weighting=weighting, **settings()), cohorts())
    sizes = federation.data().sizes
    weight_of, whole = (lambda _: 1, np.count_nonzero(sizes)) if weighting == "uniform" else (lambda e: len(e[1]), sizes.sum())
    assert_close(end, numpy_feddyn(start, cohorts(), 0.2, weight_of, whole))
    assert_differ(end, numpy_feddyn(start, cohorts(), 0.2, weight_of, 2 * whole))


def test_feddyn_without_pull_goes_as_fedavg_and_once_more_the_cohort_s_part():
    """alpha to 0: the first round is FedAvg's, and h / alpha adds |P| / m of its movement."""
    first = [next(cohorts())]
    fedavg = FedAvg(weighting="uniform", **settings())
    start, plain, _ = run(fedavg, first)
    part = np.count_nonzero(first[0].sizes) / np.count_nonzero(first[0].data.sizes)
    assert 0 < part < 1
    assert_close(run(FedDyn(alpha=1e-6, **settings()), first)[1], start + (1 + part) * (plain - start))


def test_feddyn_s_fixed_point_is_the_objective_s_however_long_clients_train():
    """Quadratics of curvatures 1 and 3 around -1 and 2: the optimum of their mean is 5 / 4."""
    columns = {"curvature": np.array([1, 3], np.float32), "slope": np.array([1, -6], np.float32)}
    both = fedsim.FederatedData.from_arrays(columns, sizes=(1, 1))
    ends = {}
    for cls, options in ((FedDyn, {"alpha": 1.0}), (FedAvg, {})):
        algorithm = on_quadratics(cls, 40, **options)
        rounds = [federation.cohort(both, round=r) for r in range(60)]
        state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), rounds)
        ends[cls] = float(jax.tree.leaves(state.params)[0][0])
    assert ends[FedDyn] == pytest.approx(1.25, abs=1e-3)
    assert abs(ends[FedAvg] - 1.25) > 0.5
