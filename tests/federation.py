"""A small population for tests, with empty clients and clients of different sizes, and a model that compiles quickly."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import fedsim
from fedsim.execution._members import Wave
from fedsim.planning import collectives_in

NUM_CLASSES = 4
FEATURES = {"x": jax.ShapeDtypeStruct((3,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}


def data(sizes=(7, 0, 3, 12, 1, 5, 9, 2), seed=0) -> fedsim.FederatedData:
    draw = np.random.default_rng(seed)
    rows = int(sum(sizes))
    columns = {
        "x": draw.normal(size=(rows, 3)).astype(np.float32),
        "y": draw.integers(0, NUM_CLASSES, rows).astype(np.int32),
    }
    return fedsim.FederatedData.from_arrays(columns, sizes=sizes, client_ids=[f"client{i}" for i in range(len(sizes))])


def singletons(clients: int) -> fedsim.FederatedData:
    """Returns a population with one example of one byte per client."""
    columns = {"x": np.zeros(clients, np.int8)}
    return fedsim.FederatedData(columns, np.arange(clients + 1), np.arange(clients).astype(str).tolist())


def data_of_zeros(sizes) -> fedsim.FederatedData:
    """Returns clients of these sizes, with one byte per example."""
    return fedsim.FederatedData.from_arrays({"x": np.zeros(int(sum(sizes)), np.int8)}, sizes=sizes)


def model() -> fedsim.Model:
    return fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.Linear(NUM_CLASSES)(examples["x"])), features=FEATURES, num_classes=NUM_CLASSES
    )


def cohort(population=None, round=0, seed=0) -> fedsim.Cohort:
    population = population or data()
    return fedsim.Cohort.of(population, population.client_ids, round=round, seed=seed)


def schedule(data, seed):
    draw = np.random.default_rng(0)
    rounds = [draw.choice(data.num_clients, size=draw.integers(0, 6), replace=False) for _ in range(30)]
    return fedsim.samplers.ScheduleSampler(data, [[data.client_ids[i] for i in ids] for ids in rounds], seed=seed)


# Functions from data and seed to a sampler of about five clients per round, by name.
SAMPLERS = {
    "UniformSampler": lambda data, seed: fedsim.samplers.UniformSampler(data, clients=5, seed=seed),
    "WeightedSampler": lambda data, seed: fedsim.samplers.WeightedSampler(data, clients=5, seed=seed),
    "PoissonSampler": lambda data, seed: fedsim.samplers.PoissonSampler(data, probability=5 / data.num_clients, seed=seed),
    "ShuffledSampler": lambda data, seed: fedsim.samplers.ShuffledSampler(data, clients=5, seed=seed),
    "CyclicSampler": lambda data, seed: fedsim.samplers.CyclicSampler(data, clients=5, seed=seed),
    "CyclicPoissonSampler": lambda data, seed: fedsim.samplers.CyclicPoissonSampler(
        data, clients=min(5, data.num_clients), cycle=max(1, data.num_clients // 10), seed=seed
    ),
    "DiurnalSampler": lambda data, seed: fedsim.samplers.DiurnalSampler(data, clients=5, seed=seed, period=6),
    "ScheduleSampler": schedule,
    "ClusteredSampling": lambda data, seed: fedsim.samplers.ClusteredSampling(data, clients=5, seed=seed),
    "Stragglers": lambda data, seed: fedsim.samplers.Stragglers(
        fedsim.samplers.UniformSampler(data, clients=5, seed=seed), fraction=0.4, epochs=4
    ),
    "Arriving": lambda data, seed: fedsim.samplers.Arriving(
        fedsim.samplers.UniformSampler(data, clients=5, seed=seed), np.arange(data.num_examples) // 7
    ),
    "Attacked": lambda data, seed: fedsim.samplers.Attacked(
        fedsim.samplers.UniformSampler(data, clients=5, seed=seed), fedsim.attacks.SignFlip(), fraction=0.4, seed=0
    ),
}

# The same of samplers that observe values of the rounds before.
STEERED = {
    "PowerOfChoice": lambda data, seed: fedsim.samplers.PowerOfChoice(data, clients=3, candidates=5, seed=seed),
    "Oort": lambda data, seed: fedsim.samplers.Oort(data, clients=3, seed=seed),
    "ImportanceByNorm": lambda data, seed: fedsim.samplers.ImportanceByNorm(data, clients=3, seed=seed),
}


def plain(tree):
    """Returns a state on the host with client memory as dense rows, so that states of different executions can be compared."""

    def dense(memory):
        if isinstance(memory, fedsim.data.ClientRows):
            memory = memory.gather(np.arange(len(memory.index)))
        return tuple(memory)

    stores = (fedsim.data.ClientRows, fedsim.rounds.ClientTable)
    return jax.device_get(
        jax.tree.map(lambda x: dense(x) if isinstance(x, stores) else x, tree, is_leaf=lambda x: isinstance(x, stores))
    )


def assert_trees_close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def compiled_rounds(algorithm):
    """Returns the compiled rounds of an algorithm that has run, for each option and for each form of state and data."""
    own, _ = algorithm._execution["traces"]
    return [of_options for traced in own._by_shapes.values() for of_options in traced._compiled.values()]


def executables(algorithm):
    """Returns the executables of an algorithm's rounds, which it may share with others."""
    return [each for programs in compiled_rounds(algorithm) for each in programs.rounds._executables.values()]


def num_executables_of_parts(programs):
    """Returns how many executables the windows of long rounds have used so far."""
    return sum(fold.num_executables for fold in programs._fold)


def out_of_memory_in_the_third_dispatch(patch):
    """Lets a device run out of memory when members that run at the same time are dispatched for the third time.

    Returns a list, to which every dispatch adds the number of its members.
    """
    run, sizes = Wave.run, []

    def limited(wave, cohorts):
        sizes.append(len(cohorts))
        if len(sizes) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return run(wave, cohorts)

    patch.setattr(Wave, "run", limited)
    return sizes


def progress_bars(patch):
    """Returns a list, to which every progress bar of members is added. The bars count, also if they are not shown."""
    bars = []

    class Bar(tqdm):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **{**keywords, "disable": False})
            bars.append(self)

    patch.setattr("fedsim.sweeps._lockstep.tqdm", Bar)
    return bars


def reads_of_states(patch):
    """Returns a list, to which every copy of members' states to the host adds their number."""
    read, sizes = Wave.read_states, []

    def counted(wave, states):
        sizes.append(len(found := read(wave, states)))
        return found

    patch.setattr(Wave, "read_states", counted)
    return sizes


def groups(line):
    """Returns the groups of devices of a collective, such as ``"{{0,1},{2,3}}"``, from its line in a compiled program."""
    [found] = collectives_in(line)
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in found.groups) + "}"
