"""Costs of exchanges: closed forms against the messages in compiled programs, and what the programs compute against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import fedsim
from fedsim import compressors, decentralized, systems
from fedsim.decentralized import costs
from fedsim.decentralized._mixer import Mixer

MEANS = [costs.AllToAll, costs.ParameterServer, costs.RingAllReduce, costs.RecursiveHalving]
TREES = [costs.BinomialTree, costs.BinaryTree]
VALUES = 24


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def ran(exchange, vectors):
    """Returns what the program gives, and the cost counted from its HLO."""
    program = exchange.program().lower(vectors).compile()
    return np.asarray(program(vectors)), costs.moved(program.as_text(), exchange.workers)


def check(exchange, values=VALUES):
    """Checks mean and cost with whole numbers, whose sums are exact in every order; servers have NaN, which nobody may read."""
    workers = exchange.workers
    vectors = np.random.default_rng(0).integers(-100, 100, [exchange.nodes, values]).astype(np.float32)
    vectors[workers:] = np.nan
    result, moved = ran(exchange, vectors)
    mean = vectors[:workers].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(result[:workers], np.tile(mean, (workers, 1)), rtol=3e-7)
    assert not result[workers:].any()
    assert moved == exchange.cost(values)


@pytest.mark.parametrize("kind", [*MEANS, *TREES])
@pytest.mark.parametrize("workers", [slow(1), slow(2), slow(3), 6, slow(7)])
def test_every_worker_gets_the_mean_by_messages_of_the_bytes_of_the_closed_form(kind, workers):
    check(kind(workers))


@pytest.mark.parametrize(
    ("exchange", "values"),
    [
        slow(costs.RingAllReduce(8), 25),  # parts of 4 values, padded
        slow(costs.RecursiveHalving(8), 25),
        (costs.RecursiveHalving(5), 3),  # four parts of 1 value
        slow(costs.BinomialTree(8), 24),
        (costs.BinaryTree(8), 24),
        (costs.ParameterServer(5, servers=3), 25),
        slow(costs.ParameterServer(2, servers=6), 24),
    ],
)
def test_the_same_with_eight_nodes_and_with_parts_of_unequal_size(exchange, values):
    check(exchange, values)


@pytest.mark.parametrize("n", [2, 4, 8, 64, 1024])
def test_costs_are_those_of_textbooks(n):
    k, alpha, beta = 3 * 1024, 1e-4, 1e-9
    log, whole = math.log2(n), 4 * k
    seconds = {
        costs.AllToAll(n): (n - 1) * (alpha + whole * beta),
        costs.ParameterServer(n): 2 * n * (alpha + whole * beta),
        costs.ParameterServer(n, servers=n): 2 * n * alpha + 2 * whole * beta,
        costs.RingAllReduce(n): 2 * (n - 1) * alpha + 2 * (n - 1) / n * whole * beta,
        costs.RecursiveHalving(n): 2 * log * alpha + 2 * (n - 1) / n * whole * beta,
        costs.BinomialTree(n): 2 * log * (alpha + whole * beta),
    }
    for exchange, expected in seconds.items():
        assert exchange.cost(k).seconds(alpha, beta) == pytest.approx(expected, rel=1e-12), exchange
    assert costs.AllToAll(n).cost(k).total == whole * n * (n - 1)
    assert costs.ParameterServer(n, servers=2).cost(k).worker == whole
    assert costs.ParameterServer(n, servers=2).cost(k).busiest == whole * n  # k n / s in, and as much out
    assert costs.RingAllReduce(n).cost(k).worker == costs.RecursiveHalving(n).cost(k).worker == 2 * whole * (n - 1) / n
    assert costs.BinomialTree(n).cost(k).total == costs.BinaryTree(n).cost(k).total == 2 * whole * (n - 1)


@pytest.mark.parametrize("kind", TREES)
def test_closed_forms_of_trees_are_those_of_their_edges_for_every_number_of_workers(kind):
    for n in range(2, 140):
        rounds = kind(n).rounds()
        edges = [edge for pairs in rounds for edge in pairs]
        degrees = np.bincount(np.array(edges).ravel(), minlength=n)
        assert sorted(child for child, _ in edges) == list(range(1, n))
        most, both = 28 * degrees.max(), 2 * len(rounds)
        assert kind(n).cost(7) == (most, 2 * most, 56 * (n - 1), both, 28 * both)
        if kind is costs.BinaryTree:
            assert {(child, (child - 1) // 2) for child, _ in edges} == set(edges)


GRAPHS = {
    "ring": decentralized.ring(8),
    "star": decentralized.star(8),
    "tree": decentralized.binary_tree(7),
    "random": decentralized.erdos_renyi(8, probability=0.4, seed=1),
    "directed": decentralized.exponential(7),
    "one peer": decentralized.one_peer_exponential(8),
    "base": decentralized.base_graph(6, 1),
}


@pytest.mark.parametrize(
    "name", [slow("star"), "directed", slow("ring"), slow("tree"), slow("random"), slow("one peer"), slow("base")]
)
def test_gossip_mixes_as_the_algorithms_do_by_messages_of_the_bytes_of_the_closed_form(name):
    topology = GRAPHS[name]
    mixer = Mixer.of(topology.matrices())
    for round in range(min(topology.period, 2)):
        exchange = costs.Gossip(topology, round=round)
        vectors = np.random.default_rng(1).normal(size=[topology.nodes, VALUES]).astype(np.float32)
        mixed, moved = ran(exchange, vectors)
        np.testing.assert_allclose(mixed, mixer(jnp.asarray(vectors), jnp.int32(round)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mixed, topology.matrices()[round] @ vectors, rtol=1e-5, atol=1e-6)
        assert moved == exchange.cost(VALUES)
        degrees = [degree for _, degree in topology.graphs[round].degree]
        factor = 1 if topology.graphs[round].is_directed() else 2
        assert exchange.cost(VALUES).total == 4 * VALUES * sum(degrees) * factor / 2
        assert exchange.cost(VALUES).busiest == 4 * VALUES * max(degrees) * factor


def test_gossip_on_the_complete_graph_is_all_to_all():
    assert costs.Gossip(decentralized.complete(8)).cost(10) == costs.AllToAll(8).cost(10)
    assert costs.Gossip(decentralized.ring(1)).cost(10) == costs.AllToAll(1).cost(10) == (0, 0, 0, 0, 0)


def counted_on_eight(function, vectors):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("nodes",))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=jax.P("nodes"), out_specs=jax.P("nodes"), check_vma=False)
    program = jax.jit(mapped).lower(vectors).compile()
    return np.asarray(program(vectors)), costs.moved(program.as_text())


def scattered(x):
    return jax.lax.all_gather(jax.lax.psum_scatter(x[0], "nodes", tiled=True), "nodes", tiled=True)[None] / 8


@pytest.mark.parametrize("function", [scattered, lambda x: jax.lax.pmean(x, "nodes")])
def test_collective_operations_of_jax_cost_what_the_ring_costs(function):
    vectors = np.arange(8 * VALUES, dtype=np.float32).reshape(8, VALUES)
    result, moved = counted_on_eight(function, vectors)
    np.testing.assert_allclose(result, np.tile(vectors.mean(axis=0), (8, 1)), rtol=3e-7)
    assert moved == costs.RingAllReduce(8).cost(VALUES)


def test_all_to_all_of_jax_sends_an_eighth_to_every_other_device():
    _, moved = counted_on_eight(lambda x: jax.lax.all_to_all(x, "nodes", 1, 1, tiled=True), np.ones([8, VALUES], np.float32))
    assert moved == (7 * 12, 2 * 7 * 12, 8 * 7 * 12, 7, 7 * 12)


def test_devices_are_counted_in_their_groups_and_by_the_dtype():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    vectors = np.ones([8, VALUES], np.int8)
    _, moved = counted_on_eight(lambda x: jax.lax.all_gather(x, "nodes", axis_index_groups=groups)[1], vectors)
    assert moved == (3 * 24, 2 * 3 * 24, 8 * 3 * 24, 3, 3 * 24)


def test_asynchronous_operations_are_counted_once():
    text = """HloModule jit_f, is_scheduled=true, num_partitions=4
ENTRY %main (param: f32[1,10]) -> f32[1,10] {
  %param = f32[1,10]{1,0:T(1,128)} parameter(0)
  %start = (f32[1,10]{1,0:T(1,128)}, f32[1,10]{1,0:T(1,128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%param), channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}
  %done = f32[1,10]{1,0:T(1,128)} collective-permute-done(%start)
  ROOT %sum = f32[1,10]{1,0:T(1,128)} all-reduce(%done), channel_id=2, replica_groups=[2,2]<=[4], to_apply=%add
}"""  # noqa: E501
    assert costs.moved(text) == (40 + 40, 160, 80 + 160, 3, 80)
    assert costs.moved(text, workers=1).worker == 80


def test_a_collective_operation_in_a_loop_is_refused():
    def repeated(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.pmean(x, "nodes"), x)

    with pytest.raises(ValueError, match=r"got all-reduce in a loop.*unroll"):
        counted_on_eight(repeated, np.ones([8, 4], np.float32))


@pytest.mark.parametrize("bits", [slow(1), slow(2), 4, 8])
def test_quantization_scales_bytes_with_the_bit_width(bits):
    values, side = 4096, 8  # bytes of the minimum and the maximum
    quantizer = compressors.UniformQuantizer(levels=2**bits)
    for exchange in [*(kind(4) for kind in [*MEANS, *TREES]), costs.Gossip(decentralized.ring(4))]:
        plain, compressed = exchange.cost(values), exchange.cost(values, quantizer)
        assert compressed.rounds == plain.rounds
        assert compressed.longest == plain.longest * bits / 32 + plain.rounds * side
        messages = exchange.cost_of(values, lambda _: 1).total
        assert compressed.total == plain.total * bits / 32 + messages * side


def test_pruning_sends_the_places_and_the_values_above_the_threshold():
    values = 100_000
    share = math.erfc(2 / math.sqrt(2))  # of a normal law beyond two standard deviations
    sent = costs.message_bytes(values, compressors.MagnitudePruning(threshold=2.0))
    assert sent == pytest.approx(values / 8 + 4 * share * values, rel=0.02)
    top = costs.message_bytes(values, compressors.TopK(fraction=0.01))
    assert top == math.ceil(1000 * (32 + math.ceil(math.log2(values))) / 8)
    assert costs.BinomialTree(8).cost(values, compressors.TopK(fraction=0.01)).total == 14 * top


def test_what_a_program_sends_of_a_compressed_vector_is_what_the_compressor_counts():
    quantizer, key = compressors.UniformQuantizer(levels=16), jax.random.key(0)

    def mixed(x):
        node = jax.lax.axis_index("nodes")
        message, _ = quantizer.encode(x[0], jax.random.fold_in(key, node))
        total = x[0]
        for shift in (1, -1):
            received = jax.tree.map(lambda a: jax.lax.ppermute(a, "nodes", [(i, (i + shift) % 8) for i in range(8)]), message)  # noqa: B023
            total += quantizer.decode(received, jax.random.fold_in(key, (node - shift) % 8), jax.eval_shape(lambda: x[0]))
        return total[None] / 3

    vectors = np.random.default_rng(2).normal(size=[8, 256]).astype(np.float32)
    result, moved = counted_on_eight(mixed, vectors)
    expected = decentralized.ring(8).matrices()[0] @ vectors
    assert np.abs(result - expected).max() < np.ptp(vectors) / 15  # two messages, each off by a level, divided by 3
    assert moved.total == costs.Gossip(decentralized.ring(8)).cost(256, quantizer).total == 16 * (256 // 2 + 8)


def test_a_large_message_is_not_made_to_be_counted():
    assert costs.message_bytes(10**9, compressors.QSGD(levels=7)) == pytest.approx(5 * 10**8, rel=1e-6)


def test_an_epoch_with_equal_workers_takes_what_its_messages_and_gradients_take():
    devices = systems.Devices(seconds_per_step=2.0, latency=0.5, upload_rate=400.0, download_rate=800.0)
    table = costs.epoch_seconds([1, 3, 4], 24, devices, values=200)
    step = 0.5 + 800 / 800 + 2 + 0.5 + 800 / 400
    for row, n in zip(table, [1, 3, 4], strict=True):
        assert row[:3] == (n, pytest.approx(24 / n * step), pytest.approx(24 / n * step))
    (small,) = costs.epoch_seconds([4], 24, devices, values=200, compressor=compressors.UniformQuantizer(levels=16))
    assert small.synchronous == pytest.approx(24 / 4 * (0.5 + 108 / 800 + 2 + 0.5 + 108 / 400))


def test_an_epoch_with_log_normal_speeds_takes_what_order_statistics_and_renewal_theory_say():
    (row,) = costs.epoch_seconds([8], 4000, systems.Devices(variation=systems.LogNormal(sigma=1.0)))
    grid = np.linspace(0, 200, 400_001)
    below = scipy.stats.lognorm(1.0).cdf(grid) ** 8
    slowest = np.trapezoid(1 - below, grid)  # the expectation of the slowest of eight
    assert row.synchronous == pytest.approx(4000 / 8 * slowest, rel=0.08)
    assert row.asynchronous == pytest.approx(4000 / 8 * math.exp(0.5), rel=0.05)
    assert row.staleness == pytest.approx(7, rel=0.01)


def test_an_epoch_with_slow_and_fast_workers_waits_for_the_slowest_or_adds_all_their_speeds():
    devices = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0))
    speeds = devices.draw([str(i) for i in range(6)], fedsim.rng.root(3)).seconds_per_step
    for row in costs.epoch_seconds([3, 6], 1200, devices, seed=3):
        assert row.synchronous == pytest.approx(1200 / row.workers * speeds[: row.workers].max())
        assert row.asynchronous == pytest.approx(1200 / (1 / speeds[: row.workers]).sum(), rel=0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: costs.RingAllReduce(0), "Expected workers >= 1, got workers=0"),
        (lambda: costs.ParameterServer(2, servers=0), "Expected servers >= 1, got servers=0"),
        (lambda: costs.RingAllReduce(4).cost(0), "Expected values >= 1, got values=0"),
        (lambda: costs.RingAllReduce(4).cost(8, 4), "Expected compressor to be an instance of Compressor"),
        (lambda: costs.RingAllReduce(4).cost(8).seconds(-1, 0), "Expected alpha >= 0"),
        (lambda: costs.RingAllReduce(9).program(), r"at least 9 devices, .* got 8: call fedsim.use_all_cores\(9\)"),
        (lambda: costs.epoch_seconds([2, 0], 10, systems.Devices()), "Expected workers >= 1, got workers=0"),
        (lambda: costs.epoch_seconds([2], 0, systems.Devices()), "Expected batches >= 1, got batches=0"),
        (lambda: costs.Gossip(8), "Expected topology to be an instance of Topology"),
        (lambda: costs.Gossip(decentralized.ring(4), "heavy"), "Expected weights to be"),
        (lambda: costs.Gossip(decentralized.ring(4), round=-1), "Expected round >= 0"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
