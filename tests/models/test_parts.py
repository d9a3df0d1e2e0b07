"""Models with running statistics, and models with parts that are frozen or kept by clients."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, algorithms, compressors, models
from fedsim.configuration import prepared
from fedsim.privacy.attacks import sent_updates

SIZES = [7, 1, 12, 5]
FEATURES = {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}


def network(examples, is_training, norm=None):
    hidden = (norm or models.BatchNorm(name="norm"))(hk.Linear(8, name="body")(examples["x"]), is_training)
    return hk.Linear(3, name="head")(jax.nn.relu(hidden))


def make_model(function=network, **options):
    kwargs = {"train_kwargs": {"is_training": True}, "eval_kwargs": {"is_training": False}}
    return fedsim.Model.from_haiku(hk.transform_with_state(function), features=FEATURES, **kwargs, **options)


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(25, 4)).astype(np.float32), "y": draw.integers(0, 3, 25).astype(np.int32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=SIZES)


def fedavg(model, cls=algorithms.FedAvg, **options):
    batches = options.pop("batches", fedsim.Batches(size=4, shuffle=False))
    return cls(model=model, client_optimizer=optax.sgd(0.1), batches=batches, **options)


def trained(algorithm, data, rounds=1):
    state = algorithm.init(jax.random.key(0))
    for number in range(rounds):
        state, info = algorithm.apply(state, cohort(data, number))
    return state, info


def cohort(data, number):
    return fedsim.UniformSampler(data, clients=4, seed=0).cohort(number)


def local_steps(params, mean, var, x, y, batch_size=4, rate=0.1, pull=0.0, center=None):
    """One client's epoch of SGD on the network, in float64. Returns the parameters and the running statistics.

    ``pull`` is the strength of a proximal term, for the parameters that ``center`` has.
    """
    p = {module: {name: np.asarray(v, np.float64) for name, v in of.items() if v is not None} for module, of in params.items()}
    for start in range(0, len(x), batch_size):
        xb, yb = x[start : start + batch_size].astype(np.float64), y[start : start + batch_size]
        n = len(xb)
        before = xb @ p["body"]["w"] + p["body"]["b"]
        of_batch, spread = before.mean(0), before.var(0)
        normal = (before - of_batch) / np.sqrt(spread + 1e-5)
        after = normal * p["norm"]["scale"] + p["norm"]["offset"]
        hidden = np.maximum(after, 0)
        logits = hidden @ p["head"]["w"] + p["head"]["b"]
        slope = np.exp(logits - logits.max(1, keepdims=True))
        slope = slope / slope.sum(1, keepdims=True)
        slope[np.arange(n), yb] -= 1
        slope /= n
        of_after = (slope @ p["head"]["w"].T) * (after > 0)
        of_normal = of_after * p["norm"]["scale"]
        of_before = (of_normal - of_normal.mean(0) - normal * (of_normal * normal).mean(0)) / np.sqrt(spread + 1e-5)
        gradients = {
            "head": {"w": hidden.T @ slope, "b": slope.sum(0)},
            "norm": {"scale": (of_after * normal).sum(0), "offset": of_after.sum(0)},
            "body": {"w": xb.T @ of_before, "b": of_before.sum(0)},
        }
        for module, of in gradients.items():
            for name, gradient in of.items():
                if center is not None and center[module][name] is not None:
                    gradient = gradient + pull * (p[module][name] - center[module][name])
                p[module][name] = p[module][name] - rate * gradient
        mean = 0.9 * mean + 0.1 * of_batch
        var = var if n == 1 else 0.9 * var + 0.1 * spread * n / (n - 1)
    return p, mean, var


def reference(params, data):
    """One round of FedAvg: the weighted means of parameters and running statistics."""
    results = []
    for number in range(len(SIZES)):
        own = data.client(number).examples
        results.append(local_steps(params, np.zeros(8), np.ones(8), np.asarray(own["x"]), np.asarray(own["y"])))
    weights = np.array(SIZES) / sum(SIZES)
    return jax.tree.map(lambda *of_clients: sum(w * x for w, x in zip(weights, of_clients, strict=True)), *results)


def assert_close(ours, theirs, tolerance=1e-5):
    for module, of in theirs.items():
        for name, value in of.items():
            np.testing.assert_allclose(ours[module][name], value, atol=tolerance, err_msg=f"{module}/{name}")


every_execution = pytest.mark.parametrize(
    "execution",
    [fedsim.Jit(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=2), fedsim.Pmap(devices=8), fedsim.Debug()],
    ids=["jit", "lanes", "two", "eight", "debug"],
)


@pytest.mark.first(1)
@every_execution
def test_fedavg_with_batch_normalization_against_numpy(execution, data):
    """Sizes are no multiples of the batch size, and a client has a single example."""
    algorithm = fedavg(make_model(), execution=execution)
    state = algorithm.init(jax.random.key(0))
    params, mean, var = reference(state.server.params, data)
    after, info = algorithm.apply(state, cohort(data, 0))
    assert_close(after.server.params, params)
    assert_close(after.parts.statistics, {"norm": {"mean": mean, "var": var}})
    sent = sum(x.size for x in jax.tree.leaves((after.server.params, after.parts.statistics)))
    assert info.clients["bits_up"][:4].tolist() == [32 * sent] * 4


@pytest.mark.slow
@every_execution
def test_fedavg_with_batch_normalization_against_pytorch(execution):
    """Runs where PyTorch is installed, which it is not with fedsim. PyTorch refuses a batch of one example."""
    torch = pytest.importorskip("torch")
    draw, sizes = np.random.default_rng(1), [7, 3, 11, 4]
    columns = {"x": draw.normal(size=(25, 4)).astype(np.float32), "y": draw.integers(0, 3, 25).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=sizes)
    algorithm = fedavg(make_model(), execution=execution)
    state = algorithm.init(jax.random.key(0))
    start = state.params

    def trained_in_pytorch(number):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        body, norm, _, head = net
        for layer, values in ((body, start["body"]), (head, start["head"])):
            weight, bias = (torch.tensor(np.array(values[name])) for name in ("w", "b"))
            layer.load_state_dict({"weight": weight.T, "bias": bias})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = (torch.tensor(np.array(data.client(number).examples[name])) for name in ("x", "y"))
        for xb, yb in zip(x.split(4), y.long().split(4), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(xb), yb).backward()
            optimizer.step()
        statistics = {"mean": norm.running_mean, "var": norm.running_var}
        values = {
            "body": {"w": body.weight.T, "b": body.bias},
            "norm": {"scale": norm.weight, "offset": norm.bias, **statistics},
            "head": {"w": head.weight.T, "b": head.bias},
        }
        return jax.tree.map(lambda x: x.detach().numpy(), values)

    mean = jax.tree.map(lambda *x: np.average(x, axis=0, weights=sizes), *map(trained_in_pytorch, range(4)))
    state, _ = algorithm.apply(state, cohort(data, 0))
    assert_close(state.params, mean)


def test_evaluation_uses_running_statistics(data):
    model = make_model()
    state, _ = trained(fedavg(model), data, rounds=2)
    whole = jax.tree.map(np.asarray, state.params)
    one = {name: column[:1] for name, column in data.columns.items()}
    x = one["x"] @ whole["body"]["w"] + whole["body"]["b"]
    norm = whole["norm"]
    x = (x - norm["mean"]) / np.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["offset"]
    expected = np.maximum(x, 0) @ whole["head"]["w"] + whole["head"]["b"]
    np.testing.assert_allclose(model.apply_for_eval(state.params, one), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"got none for norm/mean, norm/var: give state\.params"):
        fedsim.evaluate(model, state.server.params, data)


@pytest.mark.first(1)
@pytest.mark.parametrize("statistics", ["client", "frozen"])
def test_statistics_that_are_not_sent(statistics, data):
    state, info = trained(fedavg(make_model(statistics=statistics)), data)
    assert info.clients["bits_up"][0] == 32 * sum(x.size for x in jax.tree.leaves(state.server.params))
    first = {"norm": {"mean": np.zeros(8), "var": np.ones(8)}}
    assert_close(state.params, first, 0)  # for the server, those of a client that has not trained
    if statistics == "client":
        (memory, kept), _ = state.clients.rows
        assert memory == () and np.ptp(kept.own_statistics["norm"]["mean"], axis=0).min() > 0


def float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.slow
def test_personal_models_of_ditto_have_their_own_parts_against_numpy(data):
    """The second round of a client: its copy of the global model and its personal model have different heads and statistics."""
    model = make_model().with_parts(kept="head/*")
    algorithm = fedavg(model, algorithms.Ditto, lam=0.5)
    state = algorithm.init(jax.random.key(0))
    start = float64(state.params)
    copies, personal = [start] * 4, [start] * 4
    for number in range(2):
        before = float64(state.server.params)
        mean, var = (float64(state.parts.statistics)["norm"][name] for name in ("mean", "var"))
        state, _ = algorithm.apply(state, cohort(data, number))
        results = []
        for client in range(4):
            own = data.client(client).examples
            examples = np.asarray(own["x"]), np.asarray(own["y"])
            sent = {**before, "head": copies[client]["head"]}
            copies[client], *statistics = local_steps(sent, mean, var, *examples)
            results.append((copies[client], *statistics))
            old = personal[client]["norm"]
            new, *of_personal = local_steps(personal[client], old["mean"], old["var"], *examples, pull=0.5, center=before)
            new["norm"] = {**new["norm"], "mean": of_personal[0], "var": of_personal[1]}
            personal[client] = new
        weights = np.array(SIZES) / sum(SIZES)
        mean, var = (sum(w * each[i] for w, each in zip(weights, results, strict=True)) for i in (1, 2))
        assert_close(state.parts.statistics, {"norm": {"mean": mean, "var": var}})
        body = sum(w * each[0]["body"]["w"] for w, each in zip(weights, results, strict=True))
        np.testing.assert_allclose(state.server.params["body"]["w"], body, atol=1e-5)
    (memory, kept), _ = state.clients.rows
    for client in range(4):
        assert_close(jax.tree.map(lambda x: x[client], memory), personal[client])  # noqa: B023
        np.testing.assert_allclose(kept.kept["head"]["w"][client], copies[client]["head"]["w"], atol=1e-5)
    evaluated = fedsim.evaluate_personalized(algorithm, state, data, data).clients["loss"].result()
    x, y = (np.asarray(data.client(2).examples[name]) for name in ("x", "y"))
    np.testing.assert_allclose(evaluated[2], loss_of(personal[2], x, y), atol=1e-5)


def loss_of(p, x, y):
    """Returns the mean cross-entropy in evaluation, in float64."""
    norm = p["norm"]
    hidden = (x @ p["body"]["w"] + p["body"]["b"] - norm["mean"]) / np.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["offset"]
    logits = np.maximum(hidden, 0) @ p["head"]["w"] + p["head"]["b"]
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


@pytest.mark.slow
def test_clusters_have_their_own_running_statistics_against_numpy(data):
    algorithm = fedavg(make_model(), algorithms.HypCluster, num_clusters=2)
    state = algorithm.init(jax.random.key(0))
    for number in range(2):
        models = [jax.tree.map(lambda x: x[i], float64(state.params)) for i in range(2)]  # noqa: B023
        state, info = algorithm.apply(state, cohort(data, number))
        sums = [[], []]
        for client, size in enumerate(SIZES):
            x, y = (np.asarray(data.client(client).examples[name]) for name in ("x", "y"))
            losses = [loss_of(model, x, y) for model in models]
            slot = cohort(data, number).clients.tolist().index(client)
            np.testing.assert_allclose(info.clients["cluster_losses"][slot], losses, atol=1e-5)
            chosen = int(np.argmin(losses))
            old = models[chosen]["norm"]
            new, mean, var = local_steps(models[chosen], old["mean"], old["var"], x, y)
            new["norm"] = {**new["norm"], "mean": mean, "var": var}
            sums[chosen].append((size, new))
        for i, of_cluster in enumerate(sums):
            sizes, results = zip(*of_cluster, strict=True)
            expected = jax.tree.map(lambda *x: np.average(x, axis=0, weights=sizes), *results)  # noqa: B023
            assert_close(jax.tree.map(lambda x: x[i], state.params), expected)  # noqa: B023
    whole = sum(x.size for x in jax.tree.leaves(models[0]))
    assert info.clients["bits_up"][0] == 32 * whole + 32  # and the number of the model


@pytest.mark.slow
def test_clusters_start_from_models_with_statistics_of_one_client(data):
    """Of each model; frozen parameters are common, and a client is evaluated with the statistics of the model it chooses."""
    algorithm = fedavg(make_model().with_parts(frozen="head/*"), algorithms.HypCluster, num_clusters=2)
    state = algorithm.init_from(data, seed=0)
    models = [
        {name: jax.tree.map(lambda x: x[i], of) for name, of in float64(state.params).items() if name != "head"}  # noqa: B023
        | {"head": float64(state.params["head"])}
        for i in range(2)
    ]
    assert np.abs(models[0]["norm"]["mean"] - models[1]["norm"]["mean"]).min() > 1e-4
    losses = fedsim.evaluate_personalized(algorithm, state, data, data).clients["loss"].result()
    for client in range(4):
        x, y = (np.asarray(data.client(client).examples[name]) for name in ("x", "y"))
        np.testing.assert_allclose(losses[client], min(loss_of(model, x, y) for model in models), atol=1e-5)
    after, info = algorithm.apply(state, cohort(data, 0))
    assert_close(after.params, {"head": state.params["head"]}, 0)
    assert (np.asarray(info.clients["weight"][:4]) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"statistics": "client"}])
def test_personal_models_are_fine_tuned_with_their_own_statistics(options, data):
    """Fine-tuning for no step evaluates the personal models, and for some steps changes their running statistics."""
    algorithm = fedavg(make_model(**options), algorithms.Ditto)
    state, _ = trained(algorithm, data)
    none = fedavg(algorithm.model, batches=fedsim.Batches(size=4, max_steps=1))
    none = dataclasses.replace(none, client_optimizer=optax.sgd(1e-12))
    once = fedsim.evaluate_personalized(algorithm, state, data, data).clients["loss"].result()
    tuned = fedsim.evaluate_personalized(algorithm, state, data, data, fine_tune=none).clients["loss"].result()
    memory = float64(state.clients.rows[0] if not options else state.clients.rows[0][0])
    client = 3
    x, y = (np.asarray(data.client(client).examples[name]) for name in ("x", "y"))
    own = jax.tree.map(lambda x: x[client], memory)
    np.testing.assert_allclose(once[client], loss_of(own, x, y), atol=1e-5)
    assert abs(once[client] - tuned[client]) > 1e-5


@pytest.mark.slow
def test_some_parameters_are_averaged_with_equal_weights(data):
    """Against the aggregates with weights by examples and with equal weights, of the same local steps; bits are the same."""
    by_name = {}
    for name, options in {
        "examples": {},
        "uniform": {"weighting": "uniform"},
        "partly": {"aggregator": aggregators.PartlyUniform(["head/*"])},
    }.items():
        by_name[name] = trained(fedavg(make_model(), execution=fedsim.Pmap(devices=2), **options), data)
    params = {name: jax.tree.map(np.asarray, state.server.params) for name, (state, _) in by_name.items()}
    assert_close(params["partly"], {"head": params["uniform"]["head"], "body": params["examples"]["body"]}, 1e-6)
    assert np.abs(params["uniform"]["head"]["w"] - params["examples"]["head"]["w"]).max() > 1e-3
    assert by_name["partly"][1].clients["bits_up"].tolist() == by_name["examples"][1].clients["bits_up"].tolist()
    with pytest.raises(ValueError, match=r"no parameter 'haed/\*' to be averaged with equal weights. Did you mean 'head/w'"):
        trained(fedavg(make_model(), aggregator=aggregators.PartlyUniform("haed/*")), data)
    with pytest.raises(ValueError, match="AgnosticFedAvg needs the aggregator Sum"):
        fedavg(make_model(), algorithms.AgnosticFedAvg, num_domains=3, aggregator=aggregators.PartlyUniform("head/*"))


def test_mime_sends_running_statistics_once(data):
    state, info = trained(fedavg(make_model(), algorithms.Mime), data)
    params, statistics = (sum(x.size for x in jax.tree.leaves(a)) for a in (state.server.params, state.parts.statistics))
    assert info.clients["bits_up"][0] == 32 * (2 * params + statistics)
    assert info.clients["bits_down"][0] == 32 * (3 * params + statistics + 2)  # the gradient, and the round twice


ALGORITHMS = [
    (algorithms.FedProx, {"mu": 0.1}),
    (algorithms.SCAFFOLD, {}),
    (algorithms.SCAFFOLD, {"control_variate": "I"}),
    (algorithms.FedDyn, {}),
    (algorithms.FedNova, {}),
    (algorithms.QFedAvg, {"q": 1.0}),
    (algorithms.AdaptiveFedProx, {}),
    (algorithms.FedAdam, {"server_learning_rate": 0.01}),
    (algorithms.FedMGDA, {}),
    (algorithms.MimeLite, {}),
    (algorithms.Mime, {}),
    (algorithms.FedAvg, {"averaging": 0.9}),
    (algorithms.FedAvg, {"aggregator": aggregators.CoordinateMedian()}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options"), ALGORITHMS, ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value)
)
def test_compiled_and_python_agree(cls, options, data):
    model = make_model()
    states = [trained(fedavg(model, cls, execution=each, **options), data, 2)[0] for each in (fedsim.Jit(), fedsim.Debug())]
    leaves = [jax.tree.leaves(state.params) for state in states]
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    assert np.abs(states[0].params["norm"]["mean"]).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": aggregators.Krum(attackers=0)},
        {"server_optimizer": optax.sgd(0.5, momentum=0.9)},
        {"aggregator": aggregators.Clipped(0.05)},
        {"aggregator": aggregators.Compressed(compressors.TopK(fraction=0.25))},
        {"aggregator": aggregators.GaussianMechanism(1.0, clip=0.05, denominator=4), "weighting": "uniform"},
    ],
    ids=["krum", "momentum", "clip", "top_k", "noise"],
)
def test_server_optimizers_rules_clips_compressors_and_noise_see_parameters_only(options, data):
    """Statistics that are not sent give the same parameters, because training does not read the running statistics."""
    averaged, own = (trained(fedavg(make_model(statistics=each), **options), data)[0].server for each in ("average", "client"))
    for x, y in zip(jax.tree.leaves(averaged), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(x, y)


def test_norms_of_updates_are_those_of_parameters(data):
    averaged, own = (
        trained(fedavg(make_model(statistics=each), update_norms=True), data)[1].clients["update_norm"]
        for each in ("average", "client")
    )
    np.testing.assert_array_equal(averaged, own)
    assert np.min(own) > 0


@pytest.mark.slow
def test_colluding_attackers_see_neither_statistics_nor_losses(data):
    """Updates of q-FedAvg have auxiliary data of their own, inside of those with running statistics."""
    sampler = fedsim.UniformSampler(data, clients=4, seed=0)
    sampler = fedsim.samplers.Attacked(sampler, fedsim.attacks.MinMax(), fraction=0.25, seed=0)
    states = []
    for each in ("average", "client"):
        algorithm = fedavg(make_model(statistics=each), algorithms.QFedAvg, q=1.0)
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), sampler.cohort(0))[0].server)
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(x, y)


# Bits of a message with n numbers. Of a quarter of them, the values are sent, and one bit for each number says which.
MESSAGES = {
    "plain": (algorithms.FedAvg, {}, lambda n: 32 * n),
    "scaffold": (algorithms.SCAFFOLD, {}, lambda n: 2 * 32 * n),
    "top_k": (
        algorithms.FedAvg,
        {"aggregator": aggregators.Compressed(compressors.TopK(fraction=0.25))},
        lambda n: 32 * round(n / 4) + n,
    ),
    "clip": (algorithms.FedAvg, {"aggregator": aggregators.Clipped(1.0)}, lambda n: 32 * n),
    "secure_mean": (algorithms.FedAvg, {"aggregator": aggregators.SecureMean(max_weight=12.0)}, lambda n: 32 * (n + 1)),
}


@pytest.mark.first(2)
@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize(
    ("parts", "trained_part", "statistics", "kept"),
    [({"frozen": "body/*"}, 16 + 27, 16, 0), ({"frozen": "body/*", "kept": "head/*"}, 16, 16, 27)],
    ids=["frozen", "kept"],
)
def test_messages_and_memory_are_those_of_the_trained_part(message, parts, trained_part, statistics, kept, data):
    """The body has 40 parameters, the normalization 16 and as many statistics, which no compressor changes, and the head 27."""
    cls, options, bits = MESSAGES[message]
    own = {"statistics": "client"} if message == "secure_mean" else {}
    algorithm = fedavg(make_model(**own).with_parts(**parts), cls, **options)
    state, info = trained(algorithm, data)
    assert info.clients["bits_up"][:4].tolist() == [bits(trained_part) + (0 if own else 32 * statistics)] * 4
    rows = jax.tree.leaves(getattr(state.clients, "rows", ()))
    expected = kept + (statistics if own else 0) + (trained_part if cls is algorithms.SCAFFOLD else 0)
    assert sum(x[0].size for x in rows) == expected and all(len(x) == 4 for x in rows)
    if own:
        with pytest.raises(ValueError, match=r"would be sent unmasked.*statistics='client'"):
            trained(fedavg(make_model().with_parts(**parts), cls, **options), data)


def plain_norm(examples, is_training):
    def normalize(x, is_training):
        mean = hk.get_state("mean", x.shape[1:], init=jnp.zeros)
        if is_training:
            hk.set_state("mean", 0.9 * mean + 0.1 * jnp.mean(x, axis=0))
        return x - mean[None]

    return network(examples, is_training, normalize)


def test_padding_must_not_enter_statistics(data):
    algorithm = fedavg(make_model(plain_norm))
    with pytest.raises(ValueError, match=r"of 3 of 4 clients.*running statistics \(.*mean\).*drop_remainder=True"):
        algorithm.apply(algorithm.init(jax.random.key(0)), cohort(data, 0))
    whole = fedavg(make_model(plain_norm), batches=fedsim.Batches(size=4, drop_remainder=True))
    with pytest.warns(UserWarning, match="never take a step"):
        state, _ = trained(whole, data)
    assert np.isfinite(state.params["head"]["w"]).all()


def unchanged(key, examples):
    return examples


@pytest.mark.parametrize("how", [{"drop_remainder": True}, {"steps": 2}])
@pytest.mark.parametrize(
    ("cls", "options", "what"),
    [
        (algorithms.QFedAvg, {}, "the loss before training"),
        (algorithms.AdaptiveFedProx, {}, "the loss before training"),
        (algorithms.SCAFFOLD, {"control_variate": "I"}, "the gradient"),
        (algorithms.MimeLite, {}, "the gradient"),
        (algorithms.Mime, {}, "the gradient"),
        (algorithms.AgnosticFedAvg, {"num_domains": 3, "domain": "y"}, "the losses of the domains"),
        (algorithms.FixMatch, {"weak": unchanged, "strong": unchanged}, "the share of confident pseudo-labels"),
    ],
)
def test_padding_must_not_enter_a_pass_over_all_examples(cls, options, what, how):
    """These passes read all examples, whatever the training reads."""
    columns = {"x": np.ones((11, 4), np.float32), "y": np.arange(11, dtype=np.int32) % 3}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[5, 6])
    model, masked = (dataclasses.replace(make_model(*norm, statistics="client"), num_classes=3) for norm in ((plain_norm,), ()))
    batches = fedsim.Batches(size=4, **how)
    for without in (algorithms.FedAvg, algorithms.SCAFFOLD):
        fedavg(model, without, batches=batches).check(data)
    with pytest.raises(ValueError, match=rf"of 2 of 2 clients.*\(.*mean\) of the pass .* computes {what}: choose a batch size"):
        fedavg(model, cls, batches=batches, **options).check(data)
    fedavg(masked, cls, batches=batches, **options).check(data)


@pytest.mark.slow
def test_padding_does_not_enter_the_losses_of_domains():
    """A batch of all examples of a client, and a larger one that is filled up, have the same losses."""
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(10, 4)).astype(np.float32), "y": draw.integers(0, 3, 10).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[5, 5])
    weights = []
    for size in (5, 8):
        algorithm = fedavg(
            make_model(statistics="client"), algorithms.AgnosticFedAvg, num_domains=3, domain="y",
            domain_learning_rate=1.0, batches=fedsim.Batches(size=size, shuffle=False), execution=fedsim.Jit(),
        )  # fmt: skip
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
        weights.append(np.asarray(state.server.weights))
    assert np.ptp(weights[0]) > 0.01
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)


def test_state_that_is_not_a_statistic_is_refused():
    def counts(examples, is_training):
        hk.set_state("calls", hk.get_state("calls", (), jnp.int32, jnp.zeros) + 1)
        return network(examples, is_training)

    with pytest.raises(ValueError, match="got ~/calls of dtype int32"):
        make_model(counts)

    def grows(examples, is_training):
        hk.set_state("seen", jnp.zeros(len(examples["x"])) if not hk.running_init() else jnp.zeros(1))
        return network(examples, is_training)

    model = make_model(grows)
    with pytest.raises(ValueError, match=r"got ~/seen of float32\[5\] after float32\[1\]"):
        model.apply_for_train(model.init_whole(jax.random.key(0)), model.dummy_examples(5), jax.random.key(0))


def test_algorithms_without_parts_refuse_them(data):
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Own(algorithms.FedAvg):
        capabilities = fedsim.Capabilities()

    with pytest.raises(ValueError, match="Own takes models whose other parts are frozen.*running statistics: use FedAvg"):
        trained(fedavg(make_model(), Own), data)
    few = {"x": np.zeros([2, 4], np.float32), "y": np.zeros(2, np.int32)}
    options = {"weak": fedsim.augmentations.noise, "strong": fedsim.augmentations.noise, "server_examples": few}
    classifier = dataclasses.replace(make_model(), num_classes=3)
    with pytest.raises(ValueError, match="FixMatch with server_examples takes no model with running statistics"):
        trained(fedavg(classifier, algorithms.FixMatch, **options), data)


def test_frozen_parts_are_neither_sent_nor_differentiated(data):
    model = dense()
    algorithm = fedavg(model.with_parts(frozen="body/*"))
    state, info = trained(algorithm, data, 2)
    start = model.init(jax.random.key(0))
    assert_close(state.params, {"body": start["body"]}, 0)
    assert np.abs(state.params["head"]["w"] - start["head"]["w"]).max() > 1e-3
    assert info.clients["bits_up"][0] == 32 * (8 * 3 + 3) == info.clients["bits_down"][0] - 32  # and the round


def test_frozen_layers_are_not_differentiated(data):
    """Products of a step: forward through both layers, and the gradient of the one that is trained alone."""

    def products(model):
        algorithm = fedavg(model, execution=fedsim.Jit())
        state = fedsim.rounds.server_state(algorithm.init(jax.random.key(0)))
        traced, _ = fedsim.execution.traced_rounds(algorithm, state, data)
        in_step = str(traced.trace().calls[0].loops[0].jaxpr).count("dot_general")
        compiled = fedsim.Jit().lower(algorithm, cohort(data, 0)).compile().as_text()
        assert compiled.count(" dot(") == in_step  # so nothing else of the round has products
        return in_step

    # Trained: 2 forward, 2 gradients of weights, 1 of the activations between the layers.
    assert products(dense()) == 5
    assert products(dense().with_parts(frozen="body/*")) == 3
    assert products(dense().with_parts(frozen="head/*")) == 4
    with pytest.raises(
        ValueError, match="FedPer takes no model with frozen parts: it divides a model by its own field head; use"
    ):
        trained(fedavg(dense().with_parts(frozen="body/*"), algorithms.FedPer), data)


def dense():
    function = hk.transform(lambda examples: hk.Linear(3, name="head")(jax.nn.relu(hk.Linear(8, name="body")(examples["x"]))))
    return fedsim.Model.from_haiku(function, features=FEATURES)


@pytest.mark.first(2)
@pytest.mark.parametrize("cls", [algorithms.FedAvg, algorithms.SCAFFOLD, algorithms.FedDyn])
def test_clients_keep_their_heads(cls, data):
    model = dense()
    algorithm = fedavg(model.with_parts(kept="head/*"), cls)
    state, info = trained(algorithm, data, 2)
    heads = state.clients.rows[0][1].kept["head"]["w"]
    assert np.ptp(heads, axis=0).max() > 1e-3 and heads.shape == (4, 8, 3)
    assert_close(state.params, {"head": model.init(jax.random.key(0))["head"]}, 0)
    per_model = {algorithms.FedAvg: 1, algorithms.SCAFFOLD: 2, algorithms.FedDyn: 1}[cls]
    assert info.clients["bits_up"][0] == 32 * per_model * (4 * 8 + 8)


def test_kept_heads_are_those_of_fedper(data):
    """FedPer draws its first head from another key, so the model here starts with that head."""
    model, head = dense(), {"kept": "head/*"}
    theirs = fedavg(model, algorithms.FedPer, head=lambda module, name: module == "head")
    first = theirs.init(jax.random.key(0))
    initial = theirs.client_memory(theirs.broadcast(first))
    start = {**model.init(jax.random.key(0)), **initial}
    fixed = fedsim.Model(
        **{name: getattr(model, name) for name in ("apply_for_train", "apply_for_eval", "loss", "metrics", "features")},
        init=lambda key: start,
    )
    ours, _ = trained(fedavg(fixed.with_parts(**head)), data, 2)
    theirs, _ = trained(theirs, data, 2)
    assert_close(ours.server.params, {"body": theirs.server.params["body"]}, 1e-6)


def test_models_in_parts_run_on_a_virtual_clock_in_populations_and_with_differential_privacy(data):
    """All of these trace a round from the state that ``init`` returns, which has the parts of the model beside the server's."""
    model = dense().with_parts(frozen="body/b", kept="head/*")
    uniform, poisson = (
        fedsim.UniformSampler(data, clients=4, seed=0),
        fedsim.samplers.PoissonSampler(data, probability=0.5, seed=0),
    )
    clock = {"synchronization": fedsim.systems.Synchronous(), "progress": False}
    simulated = fedsim.experiment.simulate(fedavg(model), uniform, rounds=2, **clock).state
    expected = fedsim.experiment.run(fedavg(model), uniform, rounds=2, progress=False).state
    pairs = zip(*(jax.tree.leaves(state.server.params) for state in (simulated, expected)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    population = fedsim.population(
        lambda rate: dataclasses.replace(fedavg(model), client_optimizer=optax.sgd(rate)),
        {"rate": [0.1]}, seeds=[0], sampler=lambda seed: uniform, rounds=2, progress=False,
    )  # fmt: skip
    assert population.how == "devices"
    mechanism = aggregators.GaussianMechanism(1.0, clip=1.0, denominator=2)
    private = fedavg(model, weighting="uniform", aggregator=mechanism)
    fedsim.privacy.Guarantee.of(private, fedsim.samplers.CyclicSampler(data, clients=2, seed=0), delta=0.01)
    frozen = dataclasses.replace(private, model=dense().with_parts(frozen="body/b"))
    guarantee = fedsim.privacy.Guarantee.of(frozen, poisson, delta=0.01)
    assert guarantee.epsilon(2) == pytest.approx(fedsim.privacy.epsilon(1.0, poisson, rounds=2, delta=0.01))
    state = private.init(jax.random.key(0))
    with pytest.raises(ValueError, match="without running statistics and without frozen or kept parts"):
        sent_updates(fedavg(model), state, cohort(data, 0))


def test_messages_on_a_virtual_clock_have_the_statistics(data):
    ready = prepared(fedavg(make_model()), fedsim.UniformSampler(data, clients=2, seed=0), None)
    parameters, statistics = (4 * 8 + 8) + 2 * 8 + (8 * 3 + 3), 2 * 8
    assert ready.bytes_down == 4 * (parameters + statistics + 1)  # and the round
    assert ready.bytes_up == 4 * (parameters + statistics)


def test_names_of_parts():
    model = dense()
    with pytest.raises(ValueError, match=r"no parameter 'haed/\*' to be kept\. Did you mean 'head/w' or 'head/b'\?"):
        model.with_parts(kept="haed/*")
    with pytest.raises(ValueError, match="got head/b as frozen and kept"):
        model.with_parts(frozen="head/b", kept=lambda name: name.startswith("head"))
    with pytest.raises(ValueError, match="some parameters to be trained and sent, got 4 frozen or kept ones"):
        model.with_parts(frozen="*")


@pytest.mark.filterwarnings("ignore")
def test_batch_normalization_of_flax_takes_the_mask(data):
    """Its running variance is that of the batch, with n in place of n - 1."""
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train, mask=None):
            x = nn.Dense(8, name="body")(x)
            mask = None if mask is None else mask[:, None]
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x, mask=mask)
            return nn.Dense(3, name="head")(nn.relu(x))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        flags = {"train_kwargs": {"train": True}, "eval_kwargs": {"train": False}}
        algorithm = fedavg(fedsim.Model.from_flax(Network(), features=FEATURES, **flags))
        state = algorithm.init(jax.random.key(0))
        names = {"body": {"kernel": "w", "bias": "b"}, "norm": {"scale": "scale", "bias": "offset"}}
        names["head"] = names["body"]
        start = state.server.params
        like_haiku = {module: {new: start[module][old] for old, new in of.items()} for module, of in names.items()}
        params, mean, _ = reference(like_haiku, data)
        state, _ = algorithm.apply(state, cohort(data, 0))
        ours = {module: {new: state.params[module][old] for old, new in of.items()} for module, of in names.items()}
    assert_close(ours, params)
    np.testing.assert_allclose(state.params["norm"]["mean"], mean, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("make", [models.resnet8, models.mobilenet_v2])
def test_vision_models_with_batch_normalization(make):
    group, batch = (jax.eval_shape(make(norm=norm).init_whole, jax.random.key(0)) for norm in ("group", "batch"))
    statistics = jax.eval_shape(make(norm="batch").init_parts, jax.random.key(0)).statistics
    count = lambda a: sum(x.size for x in jax.tree.leaves(a))  # noqa: E731
    scales = sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(group) if "scale" in str(path))
    assert count(batch) - count(group) == count(statistics) == 2 * scales


@pytest.mark.slow
def test_the_statistics_are_those_of_the_trained_parameters(data):
    """A loss may also call the server's model, before or after the client's."""

    def distilled(teacher_first):
        @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
        class Distilled(algorithms.FedAvg):
            def client_loss(self, shared, params, batch):
                order = (shared.params, params) if teacher_first else (params, shared.params)
                outputs = [self.model.outputs(each, batch) for each in order]
                teacher, student = outputs if teacher_first else outputs[::-1]
                return self.model.mean_loss(batch, student) + 0 * jnp.sum(teacher)

        return trained(fedavg(make_model(), Distilled), data)[0].params

    def taught_by_another_model():
        other = make_model()
        whole = other.init_whole(jax.random.key(1))

        @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
        class Taught(algorithms.FedAvg):
            def client_loss(self, shared, params, batch):
                return 0 * jnp.sum(other.outputs(whole, batch)) + self.model.train_loss(params, batch)

        return trained(fedavg(make_model(), Taught), data)[0].params

    alone = trained(fedavg(make_model()), data)[0].params
    for ours in (distilled(True), distilled(False), taught_by_another_model()):
        assert_close(ours, jax.tree.map(np.asarray, alone), 1e-6)


def test_frozen_statistics_normalize_in_training_too():
    model = make_model(statistics="frozen")
    params, x = model.init_whole(jax.random.key(0)), {"x": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    np.testing.assert_array_equal(model.apply_for_train(params, x, jax.random.key(0)), model.apply_for_eval(params, x))


def test_batch_normalization_of_reshaped_examples_is_refused(data):
    def folded(examples, is_training):
        norm = lambda x, is_training: models.BatchNorm()(x.reshape(-1, 2), is_training).reshape(x.shape)  # noqa: E731
        return network(examples, is_training, norm)

    with pytest.raises(ValueError, match="with the .* examples of the batch as its first axis, got shape"):
        trained(fedavg(make_model(folded)), data)


def test_functions_and_algorithms_that_do_not_fit_parts_are_refused(data):
    with pytest.raises(ValueError, match="The function for frozen is False for all parameters, which are body/b"):
        dense().with_parts(frozen=lambda name: name.startswith("Body"))
    algorithm = fedavg(dense().with_parts(kept="head/*"), algorithms.Mime)
    with pytest.raises(
        ValueError, match="Mime takes no model with parameters that clients keep: clients train with statistics"
    ):
        trained(algorithm, data)

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Forgets(algorithms.FedAvg):
        def client_update(self, shared, client):
            local = self.train(shared, client)
            return fedsim.ClientUpdate(fedsim.tree.subtract(shared.params, local.params), 1.0)

    with pytest.raises(ValueError, match=r"client of Forgets to return the parts.*give parts=local\.parts"):
        trained(fedavg(make_model(), Forgets), data)
