"""Every client's own parameters on its own examples: against plain Python over clients, under every execution."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms
from fedsim.partitioners import hide_labels

EXECUTIONS = {
    "jit": fedsim.Jit(),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
    "debug": fedsim.Debug(),
}
TUNING = fedsim.Batches(size=3, epochs=2)
SLOPE = jax.jit(jax.grad(federation.model().train_loss))


def test_data() -> fedsim.FederatedData:
    """The clients of `federation.data`, in another order, some missing, one without examples, and three that are new."""
    names = ["client7", "client2", "new a", "client0", "client3", "new b", "client6", "client1", "client4", "new c"]
    drawn = federation.data(sizes=(5, 2, 3, 9, 0, 1, 4, 6, 2, 7), seed=9)
    return fedsim.FederatedData(drawn.columns, drawn.offsets, names)


test_data.__test__ = False


def make(cls=algorithms.Ditto, **options):
    settings = {"model": federation.model(), "batches": fedsim.Batches(size=4), "client_optimizer": optax.sgd(0.3)}
    return cls(**(settings | {"execution": fedsim.Jit()} | options))


def trained(algorithm, rounds=2):
    """Returns a state after training on some of the clients."""
    population = federation.data()
    state = algorithm.init(jax.random.key(1))
    for r in range(rounds):
        state, _ = algorithm.apply(state, fedsim.Cohort(population, [0, 2, 6, 7], r, fedsim.rng.root(0)))
    return state


@functools.cache
def ready(cls):
    """Returns an algorithm with its usual settings and a trained state, for several tests."""
    algorithm = make(cls)
    return algorithm, trained(algorithm)


def by_hand(model, params_of, test):
    """Returns sums of metrics ``[2, clients]``, computed for one client after another by the definition of the metric."""
    sums = {name: np.zeros([2, test.num_clients]) for name in model.metrics}
    for i, client in enumerate(test.clients()):
        if len(client):
            outputs = model.apply_for_eval(params_of(client.client_id), client.examples)
            for name, metric in model.metrics.items():
                sums[name][:, i] = [np.sum(np.asarray(part)) for part in metric(client.examples, outputs)]
    return sums


def assert_same(evaluation, expected):
    for name, (total, weight) in expected.items():
        np.testing.assert_allclose(evaluation.clients[name].total, total, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(evaluation.clients[name].weight, weight)
        np.testing.assert_allclose(evaluation.overall[name], total.sum() / weight.sum(), rtol=1e-5)


def fine_tuned(params, client_id, seed=0, batches=TUNING, correction=None):
    """Returns the result of SGD from ``params`` on the client's training examples, with ``correction`` added to gradients."""
    population = federation.data()
    if client_id not in population:
        return params
    root = fedsim.rng.stream(fedsim.rng.root(seed), "personal")
    ((_, dataset, key),) = fedsim.Cohort(population, [population.index(client_id)], 0, root)
    for batch in dataset.batches(batches, key):
        slope = SLOPE(params, jax.tree.map(jnp.asarray, batch))
        slope = jax.tree.map(jnp.add, slope, correction) if correction else slope
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, slope)
    return params


def personal(state, client_id):
    """Returns the model in the memory of Ditto's client of this name, or else the server's parameters."""
    population = federation.data()
    rows, seen = federation.plain(state).clients
    at = population.index(client_id) if client_id in population else -1
    return jax.tree.map(lambda leaf: leaf[at], rows[0]) if at >= 0 and seen[at] else state.params


@pytest.fixture
def few_at_once(how, monkeypatch):
    """Evaluates in several chunks, except with one of the executions."""
    if how != "jit":
        monkeypatch.setattr("fedsim.evaluation._personalized._LARGEST_CHUNK", 3)


@pytest.mark.slow
@pytest.mark.parametrize("how", EXECUTIONS)
def test_models_in_clients_memories(how, few_at_once):
    (algorithm, state), test = ready(algorithms.Ditto), test_data()
    expected = by_hand(algorithm.model, lambda client_id: personal(state, client_id), test)
    evaluation = fedsim.evaluate_personalized(
        algorithm, state, federation.data(), test, execution=EXECUTIONS[how], batch_size=4
    )
    assert_same(evaluation, expected)
    glob = fedsim.evaluate(algorithm.model, state.params, test)
    new = [test.index(name) for name in ("new a", "new b", "new c")]
    np.testing.assert_allclose(evaluation.clients["loss"].total[new], np.asarray(glob.clients["loss"].total)[new], rtol=1e-5)
    assert abs(evaluation.overall["loss"] - glob.overall["loss"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_memories_on_the_device_and_on_the_host(memory):
    algorithm = make(execution=fedsim.Jit(memory=memory))
    state, test = trained(algorithm), test_data()
    expected = by_hand(algorithm.model, lambda client_id: personal(state, client_id), test)
    assert isinstance(state.clients, fedsim.rounds.ClientTable) == (memory == "resident")
    assert_same(fedsim.evaluate_personalized(algorithm, state, federation.data(), test), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "how"), [*((algorithms.Ditto, how) for how in EXECUTIONS), (algorithms.FedAvg, "jit")])
def test_fine_tuning(how, cls, few_at_once):
    """Fine-tuning starts from the server's parameters, or from the clients' own."""
    (algorithm, state), test = ready(cls), test_data()
    tuner = make(algorithms.FedAvg, batches=TUNING, client_optimizer=optax.sgd(0.2))
    start = (lambda _: state.params) if cls is algorithms.FedAvg else (lambda client_id: personal(state, client_id))
    expected = by_hand(algorithm.model, lambda client_id: fine_tuned(start(client_id), client_id, seed=4), test)
    evaluation = fedsim.evaluate_personalized(
        algorithm, state, federation.data(), test, fine_tune=tuner, seed=4, execution=EXECUTIONS[how], batch_size=4
    )
    assert_same(evaluation, expected)


FIRST_PASS = fedsim.Batches(size=2, shuffle=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TwoPhases(algorithms.FedAvg):
    """Before its local steps, a client moves along the sum of gradients of a first pass, and by its number of steps."""

    def train(self, shared, client):
        def add(total, batch):
            return fedsim.tree.add(total, jax.grad(self.model.train_loss)(shared.params, batch))

        slope = client.for_each_batch(FIRST_PASS, add, jax.tree.map(jnp.zeros_like, shared.params), "first pass")
        by = jax.tree.map(lambda slope: 0.1 * slope + 0.01 * client.num_steps.astype(jnp.float32), slope)
        return self.local_training(shared, client).run(client, fedsim.tree.subtract(shared.params, by))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pmap, 2 devices, 2 lanes", "debug"])
def test_fine_tuning_with_a_first_pass_over_the_examples(how, few_at_once):
    (algorithm, state), test, train = ready(algorithms.FedAvg), test_data(), federation.data()
    tuner = make(TwoPhases, batches=TUNING, client_optimizer=optax.sgd(0.2))

    def expected_params(client_id):
        params = state.params
        if client_id in train:
            client = train[client_id]
            for batch in client.batches(FIRST_PASS, jax.random.key(0)):
                slope = SLOPE(state.params, jax.tree.map(jnp.asarray, batch))
                params = jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)
            params = jax.tree.map(lambda p: p - 0.01 * TUNING.num_steps(len(client)), params)
        return fine_tuned(params, client_id)

    evaluation = fedsim.evaluate_personalized(
        algorithm, state, train, test, fine_tune=tuner, execution=EXECUTIONS[how], batch_size=4
    )
    assert_same(evaluation, by_hand(algorithm.model, expected_params, test))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "how"), [(algorithms.IFCA, "pmap, 2 devices, 2 lanes"), (algorithms.IFCA, "jit"), (algorithms.FedAvg, "jit")]
)
def test_a_client_of_ifca_fine_tunes_the_model_that_it_chooses(by, how, few_at_once):
    algorithm, test, train = make(algorithms.IFCA, num_clusters=3), test_data(), federation.data()
    state = trained(algorithm)
    models = [jax.tree.map(lambda leaf, i=i: leaf[i], state.params) for i in range(3)]
    settings = {"num_clusters": 3} if by is algorithms.IFCA else {}
    tuner = make(by, batches=TUNING, client_optimizer=optax.sgd(0.2), **settings)

    def tuned(client_id):
        chosen = 0
        if client_id in train and len(train[client_id]):
            losses = [fedsim.evaluate(algorithm.model, params, train).clients["loss"].total for params in models]
            chosen = int(np.argmin([of_model[train.index(client_id)] for of_model in losses]))
        choices.add(chosen)
        return fine_tuned(models[chosen], client_id)

    choices = set()
    expected = by_hand(algorithm.model, tuned, test)
    assert len(choices) > 1
    evaluation = fedsim.evaluate_personalized(
        algorithm, state, train, test, fine_tune=tuner, execution=EXECUTIONS[how], batch_size=4
    )
    assert_same(evaluation, expected)


@pytest.mark.slow
def test_fine_tuning_by_q_fedavg_is_that_by_fedavg():
    """A client's loss changes its weight in the aggregate, and not its local steps."""
    algorithm, test = make(algorithms.QFedAvg, batches=TUNING, client_optimizer=optax.sgd(0.2)), test_data()
    state = algorithm.init(jax.random.key(1))
    expected = by_hand(algorithm.model, lambda client_id: fine_tuned(state.params, client_id), test)
    assert_same(fedsim.evaluate_personalized(algorithm, state, federation.data(), test, fine_tune=algorithm), expected)


@pytest.mark.slow
def test_fine_tuning_by_agnostic_fedavg_of_one_domain_is_that_by_fedavg():
    """Steps have the usual size, whatever the number of examples of the domain in a round."""
    plain, test = federation.data(), test_data()
    domain = np.zeros(len(plain.columns["y"]), np.int32)
    train = fedsim.FederatedData(dict(plain.columns) | {"domain": domain}, plain.offsets, plain.client_ids)
    tuning = {"batches": TUNING, "client_optimizer": optax.sgd(0.2)}
    algorithm = make(algorithms.AgnosticFedAvg, num_domains=1, **tuning)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(1)), fedsim.Cohort.of(train, train.client_ids[:3]))
    found = fedsim.evaluate_personalized(algorithm, state, train, test, fine_tune=algorithm)
    assert_same(found, by_hand(algorithm.model, lambda client_id: fine_tuned(state.params, client_id), test))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [algorithms.SCAFFOLD, algorithms.FedAvg])
def test_fine_tuning_by_scaffold(cls):
    """With the algorithm's own class it uses the control variates of server and client; otherwise it is in its first round."""
    algorithm, test, train = make(cls), test_data(), federation.data()
    state = trained(algorithm, rounds=3)
    tuner = make(algorithms.SCAFFOLD, batches=TUNING, client_optimizer=optax.sgd(0.2))

    def correction(client_id):
        if cls is algorithms.FedAvg:
            return None
        rows, seen = federation.plain(state).clients
        at = train.index(client_id) if client_id in train else 0
        kept = jax.tree.map(lambda leaf: leaf[at] * (client_id in train and seen[at]), rows[0])
        return fedsim.tree.subtract(state.server.control, kept)

    expected = by_hand(
        algorithm.model, lambda client_id: fine_tuned(state.params, client_id, correction=correction(client_id)), test
    )
    assert_same(fedsim.evaluate_personalized(algorithm, state, train, test, fine_tune=tuner), expected)


@pytest.mark.slow
def test_fine_tuning_by_fedrep_fits_the_head_and_then_the_body():
    """It starts from the server's body and the client's own head, as in the client's next round."""
    train, test = federation.data(), test_data()
    algorithm = make(algorithms.FedRep, head=lambda module, name: name == "b", head_fraction=0.4)
    state = trained(algorithm)
    tuner = make(algorithms.FedRep, head=algorithm.head, head_fraction=0.4, batches=TUNING, client_optimizer=optax.sgd(0.2))
    rows, seen = federation.plain(state).clients

    def tuned(client_id):
        at = train.index(client_id) if client_id in train else -1
        unseen = algorithm.client_memory(algorithm.broadcast(state.server))
        head = jax.tree.map(lambda leaf: leaf[at], rows[0]) if at >= 0 and seen[at] else unseen
        params = {"linear": state.params["linear"] | head["linear"]}
        if at >= 0:
            root = fedsim.rng.stream(fedsim.rng.root(0), "personal")
            ((_, dataset, key),) = fedsim.Cohort(train, [at], 0, root)
            for step, batch in enumerate(dataset.batches(TUNING, key)):
                turn = "b" if step < int(0.4 * TUNING.num_steps(len(dataset))) else "w"
                slope = SLOPE(params, jax.tree.map(jnp.asarray, batch))["linear"][turn]
                params = {"linear": params["linear"] | {turn: params["linear"][turn] - 0.2 * slope}}
        return params

    evaluation = fedsim.evaluate_personalized(algorithm, state, train, test, fine_tune=tuner)
    assert_same(evaluation, by_hand(algorithm.model, tuned, test))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [algorithms.FedAvg, algorithms.Ditto, algorithms.FedPer])
def test_an_average_over_rounds_is_evaluated(cls):
    """As the start of fine-tuning, for clients without memory, and as the body to which a client adds its own head."""
    head = {"head": lambda module, name: name == "b"} if cls is algorithms.FedPer else {}
    algorithm, test, train = make(cls, averaging=0.9, **head), test_data(), federation.data()
    state = trained(algorithm)
    tuner = make(algorithms.FedAvg, batches=TUNING, client_optimizer=optax.sgd(0.2)) if cls is algorithms.FedAvg else None

    def params_of(client_id, of=state):
        if cls is algorithms.FedAvg:
            return fine_tuned(of.params, client_id)
        if cls is algorithms.Ditto:
            return personal(state._replace(average=of.average), client_id)
        rows, seen = federation.plain(state).clients
        at = train.index(client_id) if client_id in train else -1
        kept = jax.tree.map(lambda leaf: leaf[at], rows[0])
        start = algorithm.client_memory(algorithm.broadcast(state.server))
        kept = kept if at >= 0 and seen[at] else start
        return {"linear": {"w": of.params["linear"]["w"]} | kept["linear"]}

    expected = by_hand(algorithm.model, params_of, test)
    assert_same(fedsim.evaluate_personalized(algorithm, state, train, test, fine_tune=tuner), expected)
    last = by_hand(algorithm.model, lambda client_id: params_of(client_id, state._replace(average=())), test)
    assert abs(last["loss"][0].sum() - expected["loss"][0].sum()) > 1e-3


def test_before_the_first_round_every_client_has_the_server_s_model():
    algorithm, test = make(), test_data()
    state = algorithm.init(jax.random.key(1))
    evaluation = fedsim.evaluate_personalized(algorithm, state, federation.data(), test)
    federation.assert_trees_close(evaluation, fedsim.evaluate(algorithm.model, state.params, test))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScaledByMean(algorithms.FedAvg):
    """A client uses the server's parameters times the mean of its examples' first feature."""

    def personal_params(self, shared, client):
        def add(total, batch):
            return total + jnp.sum(batch.examples["x"][:, 0], where=batch.mask)

        total = client.for_each_batch(FIRST_PASS, add, jnp.float32(0), "first pass")
        mean = jnp.where(client.num_examples > 0, total / jnp.maximum(client.num_examples, 1).astype(jnp.float32), 1.0)
        return jax.tree.map(lambda p: mean * p, shared.params)


@pytest.mark.slow
@pytest.mark.parametrize(("tune", "how"), [*((True, how) for how in EXECUTIONS), (False, "jit")])
def test_personal_params_may_read_the_training_examples(how, tune, few_at_once):
    algorithm, test, train = make(ScaledByMean), test_data(), federation.data()
    state = algorithm.init(jax.random.key(1))

    def start(client_id):
        factor = 1.0
        if client_id in train and len(train[client_id]):
            factor = float(train[client_id]["x"][:, 0].mean())
        return jax.tree.map(lambda p: factor * p, state.params)

    tuner = make(algorithms.FedAvg, batches=TUNING, client_optimizer=optax.sgd(0.2)) if tune else None
    params_of = (lambda client_id: fine_tuned(start(client_id), client_id)) if tune else start
    evaluation = fedsim.evaluate_personalized(
        algorithm, state, train, test, fine_tune=tuner, execution=EXECUTIONS[how], batch_size=4
    )
    assert_same(evaluation, by_hand(algorithm.model, params_of, test))


@pytest.mark.parametrize("name", ["DSSGD", "FedMatch"])
def test_fine_tuning_starts_from_what_clients_of_an_algorithm_download(name):
    """From equal parameters, it is that of FedAvg."""
    algorithm, fedavg, data = make(getattr(algorithms, name)), make(algorithms.FedAvg), federation.data(sizes=(3, 5))
    state = algorithm.init(jax.random.key(1))
    equal = fedavg.init(jax.random.key(1))._replace(params=state.params)
    found = fedsim.evaluate_personalized(algorithm, state, data, data, fine_tune=fedavg)
    assert found.overall == fedsim.evaluate_personalized(fedavg, equal, data, data, fine_tune=fedavg).overall


def test_participants_of_dssgd_have_what_they_keep_and_what_they_download():
    """The parameters that the server does not send are the initial ones, and those that the participant keeps are its own."""
    model, data = federation.model(), federation.data(sizes=(3, 5))
    algorithm = make(algorithms.DSSGD, model=model.with_parts(kept=["linear/b"]), theta_d=0.5)
    state = algorithm.init(jax.random.key(1))
    first = np.asarray(state.server.params["linear"]["w"])
    state = state._replace(server=state.server._replace(params={"linear": {"w": jnp.asarray(first + 1), "b": None}}))
    which = np.unpackbits(np.asarray(algorithm.broadcast(state.server).which), count=first.size).reshape(first.shape)
    own = {"linear": {"w": np.float32(first + which), "b": model.init(jax.random.key(1))["linear"]["b"]}}
    found = fedsim.evaluate_personalized(algorithm, state, data, data)
    assert which.sum() == first.size // 2
    assert_same(found, by_hand(model, lambda client_id: own, data))


def test_a_population_of_empty_clients():
    algorithm = make()
    empty = federation.data(sizes=(0, 0))
    evaluation = fedsim.evaluate_personalized(algorithm, trained(algorithm), federation.data(), empty)
    assert np.isnan(list(evaluation.overall.values())).all() and list(evaluation.overall) == ["loss", "accuracy"]


def test_if_no_client_of_the_test_data_is_known_a_warning_says_so():
    """The names 1.0 and 2.0 instead of 1 and 2, as a file of floats has them, and one known client, which gives no warning."""
    algorithm, train = make(), federation.data()
    renamed = dataclasses.replace(train, client_ids=[f"{name}.0" for name in train.client_ids])
    state = trained(algorithm)
    with pytest.warns(UserWarning, match=r"None of the 7 clients of test, .* 'client0.0', is in train.* 'client0'.* same ids"):
        evaluation = fedsim.evaluate_personalized(algorithm, state, train, renamed)
    server = fedsim.evaluate_personalized(algorithm, algorithm.init(jax.random.key(0)), train, train)
    assert evaluation.clients["accuracy"].weight.tolist() == server.clients["accuracy"].weight.tolist()
    one_known = dataclasses.replace(train, client_ids=[train.client_ids[0], *renamed.client_ids[1:]])
    fedsim.evaluate_personalized(algorithm, state, train, one_known)


def test_a_second_evaluation_compiles_nothing(monkeypatch, caplog):
    monkeypatch.setattr("fedsim.evaluation._personalized._LARGEST_CHUNK", 3)
    algorithm, test = make(), test_data()
    for rounds in (1, 2):
        state = trained(algorithm, rounds)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            caplog.clear()
            fedsim.evaluate_personalized(algorithm, state, federation.data(), test)
        compiled = [record.message for record in caplog.records if record.message.startswith("Compiling")]
        assert bool(compiled) == (rounds == 1), compiled


def test_errors_for_what_cannot_be_evaluated():
    data, fedavg = federation.data(), make(algorithms.FedAvg)
    state = fedavg.init(jax.random.key(0))
    with pytest.raises(ValueError, match="FedAvg has no personal_params.*fine_tune"):
        fedsim.evaluate_personalized(fedavg, state, data, data)
    sgd = algorithms.FedSGD(model=fedavg.model)
    with pytest.raises(ValueError, match="Expected fine_tune to be an algorithm with train, .*FedSGD"):
        fedsim.evaluate_personalized(fedavg, state, data, data, fine_tune=sgd)
    with pytest.raises(ValueError, match="Expected fine_tune .* whole model, such as FedAvg, or .* FedAvg, got IFCA"):
        fedsim.evaluate_personalized(fedavg, state, data, data, fine_tune=make(algorithms.IFCA))
    with pytest.raises(ValueError, match="Expected fine_tune to be an algorithm with train, .*Ditto"):
        fedsim.evaluate_personalized(make(), trained(make()), data, data, fine_tune=make())
    streaming = make(algorithms.StreamingDiLoCo)
    with pytest.raises(ValueError, match="Expected fine_tune to be an algorithm with train, .*StreamingDiLoCo"):
        fedsim.evaluate_personalized(streaming, streaming.init(jax.random.key(0)), data, data, fine_tune=streaming)
    mime = make(algorithms.Mime)
    for algorithm in (fedavg, mime):
        start = algorithm.init(jax.random.key(0))
        with pytest.raises(ValueError, match="Mime cannot be fine_tune: use MimeLite or FedAvg"):
            fedsim.evaluate_personalized(algorithm, start, data, data, fine_tune=mime)
    with pytest.raises(ValueError, match="Expected batch_size >= 1, or None, got batch_size=0"):
        fedsim.evaluate_personalized(make(), state, data, data, batch_size=0)
    with pytest.raises(ValueError, match="trained on a population of 8 clients, and train has 2"):
        fedsim.evaluate_personalized(make(), trained(make()), federation.data(sizes=(1, 1)), data)
    other = fedsim.FederatedData.from_arrays({"z": np.zeros(3)}, sizes=[3])
    with pytest.raises(ValueError, match="The model reads feature 'x'"):
        fedsim.evaluate_personalized(make(), state, data, other)


def test_hidden_labels_are_read_only_where_all_algorithms_learn_without_them():
    data = federation.data()
    few = hide_labels(data, fraction=0.5, seed=0)
    fixmatch = make(algorithms.FixMatch, weak=fedsim.augmentations.noise, strong=fedsim.augmentations.noise)
    state = fixmatch.init(jax.random.key(0))
    fedsim.evaluate_personalized(fixmatch, state, few, data, fine_tune=fixmatch)
    for test, tuned in ((few, fixmatch), (data, make(algorithms.FedAvg))):
        with pytest.raises(ValueError, match="has label y=-1, and the model has classes 0 to"):
            fedsim.evaluate_personalized(fixmatch, state, few, test, fine_tune=tuned)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algorithm": None}, "Expected algorithm to be an algorithm that trains a model, such as FedAvg.*algorithm=None"),
        ({"fine_tune": "sgd"}, "Expected fine_tune to be an algorithm .* got fine_tune='sgd'"),
        ({"fine_tune": algorithms.FedAvg}, "Expected fine_tune to be an algorithm .* got fine_tune=<class"),
        (
            {"execution": "jit"},
            r"Expected execution to be an instance of .*, such as fedsim.Jit\(\), or None, got execution='jit'",
        ),
        ({"train": {}}, "Expected train to be an instance of .*, such as data.train, got train={}"),
        ({"test": None}, "Expected test to be an instance of .* got test=None"),
        ({"rows": np.zeros((2, 2), int)}, r"Expected rows \[8, 2\], two positions for each client of train, got \[2, 2\]"),
        ({"seed": "a"}, "Expected seed to be a whole number or a key of jax.random, got seed='a'"),
        ({"state": None}, "The state is not one of this Ditto, but of another algorithm or model: it has nothing for .params"),
    ],
)
def test_errors_name_the_wrong_argument(wrong, message):
    arguments = {
        "algorithm": make(),
        "state": make().init(jax.random.key(0)),
        "train": federation.data(),
        "test": federation.data(),
    }
    with pytest.raises(ValueError, match=message):
        fedsim.evaluate_personalized(**arguments | wrong)


def test_a_state_of_another_algorithm_is_refused():
    apfl, ifca = trained(make(algorithms.APFL)), make(algorithms.IFCA).init(jax.random.key(0))
    for state, message in ((apfl, "but of another algorithm or model"), (ifca, "for .params")):
        with pytest.raises(ValueError, match=f"not one of this Ditto.*{message}"):
            fedsim.evaluate_personalized(make(), state, federation.data(), federation.data())


@pytest.mark.slow
def test_averages_and_error_feedback_in_the_state_do_not_matter():
    data = federation.data()
    feedback = fedsim.aggregators.Compressed(fedsim.compressors.ErrorFeedback(fedsim.compressors.TopK(fraction=0.5)))
    for changes in ({"averaging": 0.5}, {"aggregator": feedback}):
        state = trained(make(algorithms.FedAvg, **changes))
        found = fedsim.evaluate_personalized(make(algorithms.PerFedAvg, alpha=0.0), state, data, data)
        federation.assert_trees_close(found, fedsim.evaluate(federation.model(), state.params, data), rtol=1e-5)
    fed_back = make(aggregator=feedback)
    found, expected = (fedsim.evaluate_personalized(of, trained(fed_back), data, data) for of in (make(), fed_back))
    federation.assert_trees_close(found, expected)


@pytest.mark.slow
def test_personal_params_come_from_the_client_s_memory():
    """The clients keep parameters that differ from the server's, and a step of length 0 does not change them."""
    data = federation.data()

    class Kept(algorithms.PerFedAvg):
        def client_memory(self, shared):
            return shared.params

        def personal_params(self, shared, client):
            return client.memory

        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(memory=jax.tree.map(lambda x: x + 1.0, shared.params))

    algorithm = make(Kept, alpha=0.0)
    state = trained(algorithm)
    found = fedsim.evaluate_personalized(algorithm, state, data, data)
    assert abs(found.overall["loss"] - fedsim.evaluate(algorithm.model, state.params, data).overall["loss"]) > 0.01
    rows, seen = state.clients
    for client in np.flatnonzero(seen)[:2]:
        own = jax.tree.map(lambda leaf, client=client: leaf[client], rows[0])
        alone = fedsim.evaluate(algorithm.model, own, data.select([data.client_ids[client]]))
        mean = found.clients["loss"]
        assert float(mean.result()[client]) == pytest.approx(alone.overall["loss"], rel=1e-4)
