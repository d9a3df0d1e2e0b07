"""Topologies and mixing matrices, against closed forms and published values."""

import functools
import math

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
from fuzz import mutations

from fedsim import decentralized
from fedsim.decentralized import Topology, consensus_error, is_doubly_stochastic, spectral_gap


def gap(topology, weights="auto"):
    (matrix,) = topology.matrices(weights)
    return spectral_gap(matrix)


@pytest.mark.parametrize(("nodes", "value"), [(4, 0.666667), (9, 0.155970), (16, 0.050747), (64, 0.003210), (256, 0.000201)])
def test_spectral_gap_of_rings(nodes, value):
    assert gap(decentralized.ring(nodes)) == pytest.approx(value, abs=5e-7)
    assert gap(decentralized.ring(nodes)) == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / nodes)), abs=1e-9)


@pytest.mark.parametrize("weights", ["auto", "edges"])
def test_in_a_round_without_edges_nodes_keep_their_values(weights):
    on, off = (nx.Graph([(0, 1, {"weight": weight})]) for weight in (0.25, 0.0))
    mixing, idle = Topology([on, off]).matrices(weights)
    assert (mixing.toarray().tolist(), idle.toarray().tolist()) == ([[0.75, 0.25], [0.25, 0.75]], [[1, 0], [0, 1]])


@pytest.mark.parametrize(("nodes", "value"), [(9, 0.6), (16, 0.4), (25, 0.276393), (64, 0.117157), (256, 0.030448)])
def test_spectral_gap_of_tori(nodes, value):
    assert gap(decentralized.torus(nodes)) == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize("nodes", [4, 6, 8, 14, 16, 32, 48, 64, 128])
def test_spectral_gap_of_exponential_graphs_and_hypercubes(nodes):
    expected = 2 / (1 + math.ceil(math.log2(nodes)))
    assert gap(decentralized.exponential(nodes)) == pytest.approx(expected, abs=1e-9)
    if nodes & (nodes - 1) == 0:
        assert gap(decentralized.hypercube(nodes)) == pytest.approx(expected, abs=1e-9)


def test_spectral_gap_of_exponential_graphs_with_odd_nodes():
    assert [round(gap(decentralized.exponential(nodes)), 6) for nodes in (9, 25)] == [0.558213, 0.489139]


def test_a_large_graph_has_the_spectral_gap_of_its_closed_form():
    expected = (2 - 2 * math.cos(2 * math.pi / 40)) / 5
    assert gap(decentralized.torus(1600)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("nodes", [2, 8, 16, 64])
def test_one_peer_exponential_graphs_average_exactly(nodes):
    topology = decentralized.one_peer_exponential(nodes)
    assert topology.period == math.log2(nodes) and consensus_error(topology.matrices()) == 0.0
    assert all(set(dict(graph.out_degree).values()) == {1} for graph in topology.graphs)


def check_base_graphs(degree, numbers):
    for nodes in numbers:
        topology = decentralized.base_graph(nodes, degree)
        matrices = topology.matrices()
        assert consensus_error(matrices) < 1e-14
        assert all(is_doubly_stochastic(matrix) for matrix in matrices)
        assert max(max(dict(graph.degree).values()) for graph in topology.graphs) <= degree
        assert nodes == 1 or topology.period <= 2 * math.log(nodes) / math.log(degree + 1) + 2


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_base_graphs_average_exactly_for_some_numbers_of_nodes(degree):
    check_base_graphs(degree, [1, 2, 3, 5, 6, 7, 16, 23, 30])


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_base_graphs_average_exactly_for_every_number_of_nodes(degree):
    check_base_graphs(degree, range(1, 100))


@pytest.mark.parametrize(
    ("degree", "periods"),
    [
        (1, {5: 5, 6: 4, 7: 5, 9: 7, 25: 9, 31: 9, 100: 11}),
        (2, {5: 3, 6: 2, 7: 4, 9: 2, 25: 6, 31: 7, 100: 8}),
        (4, {25: 2}),
    ],
)
def test_base_graphs_have_the_published_periods(degree, periods):
    assert {nodes: decentralized.base_graph(nodes, degree).period for nodes in periods} == periods


@pytest.mark.parametrize("name", list(decentralized.TOPOLOGIES))
def test_every_topology_has_stochastic_matrices_that_reach_consensus(name):
    topology = decentralized.TOPOLOGIES[name](nodes=16)
    matrices = topology.matrices()
    assert topology.nodes == 16 and len(matrices) == topology.period
    for matrix, graph in zip(matrices, topology.graphs, strict=True):
        values = matrix.toarray()
        np.testing.assert_allclose(values.sum(axis=1), 1)
        edges = {(target, source) for source, target in graph.to_directed().edges}
        assert set(zip(*np.nonzero(values - np.diag(np.diag(values))), strict=True)) == edges
        np.testing.assert_allclose(values.sum(axis=0), 1)  # all of them, as they are symmetric or regular
    product = functools.reduce(np.matmul, [matrix.toarray() for matrix in (matrices * 400)[:400]])
    assert np.abs(product - 1 / 16).max() < 0.05


@pytest.mark.first(3)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize(
    "topology", [decentralized.random_regular(16, degree=6), decentralized.star(40), decentralized.complete(60)]
)
def test_nodes_that_agree_keep_every_bit(topology, dtype):
    values = jnp.full([topology.nodes, 2], 0.3, dtype)
    for weights in ("auto", "uniform", "lazy"):
        np.testing.assert_array_equal(decentralized.gossip(values, topology, 50, weights), values)


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: decentralized.erdos_renyi(12, probability=0.2, seed=seed),
        lambda seed: decentralized.random_regular(12, degree=2, seed=seed),
        lambda seed: decentralized.small_world(12, degree=2, rewiring=0.9, seed=seed),
    ],
)
def test_seeds_whose_first_draw_is_not_connected_have_different_graphs(draw):
    assert len({frozenset(map(frozenset, draw(seed).graphs[0].edges)) for seed in range(20)}) == 20


def test_weights():
    graph = nx.star_graph(3)
    dense = {name: rule(graph).toarray() for name, rule in decentralized.WEIGHTS.items() if name != "edges"}
    np.testing.assert_allclose(dense["metropolis"][0], [0.25, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(dense["metropolis"][1], [0.25, 0.75, 0, 0])
    np.testing.assert_allclose(dense["lazy"], (np.eye(4) + dense["metropolis"]) / 2)
    np.testing.assert_allclose(dense["uniform"][1], [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(dense["column_stochastic"], dense["uniform"].T)  # of an undirected graph


def test_push_sum_reaches_the_average_on_a_directed_graph_that_is_not_regular():
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)])
    (matrix,) = Topology([graph]).matrices("column_stochastic")
    assert not is_doubly_stochastic(matrix)
    values, weights = np.array([1.0, 5.0, -2.0, 8.0]), np.ones(4)
    for _ in range(200):
        values, weights = matrix @ values, matrix @ weights
    np.testing.assert_allclose(values / weights, 3.0)


def test_the_undirected_equi_static_graph_is_that_of_its_formula():
    (directed,) = decentralized.equi_static(7, shifts=2, seed=3).matrices()
    (undirected,) = decentralized.equi_static(7, shifts=2, directed=False, seed=3).matrices()
    np.testing.assert_allclose(undirected.toarray(), (directed + directed.T).toarray() / 2)
    assert directed.toarray()[0, 0] == pytest.approx(1 / 7)
    assert sorted(directed.toarray()[0])[-2:] == pytest.approx([3 / 7, 3 / 7])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology([nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(2))]), "not connected.*2 parts of .3, 2. nodes"),
        (lambda: Topology([nx.DiGraph([(0, 1), (1, 2)])]), "not connected"),
        (lambda: Topology([nx.Graph([(0, 1, {"weight": 0.5}), (1, 2, {"weight": 0.0})])]), "not connected.*2 parts of .2, 1."),
        (lambda: Topology([]), "at least one graph"),
        (lambda: Topology([nx.path_graph(["a", "b"])]), "nodes are 0 to n - 1"),
        (lambda: Topology([nx.path_graph(3), nx.path_graph(4)]), "the same in all"),
        (lambda: Topology([nx.Graph([(0, 1, {"weight": 1.5})])]), r"edge \(0, 1\) has weight 1.5"),
        (lambda: Topology([nx.Graph([(0, 1, {"weight": 0.5}), (1, 2)])]), "1 of 2 have one"),
        (lambda: decentralized.hypercube(12), "power of two.*give 8 or 16"),
        (lambda: decentralized.torus(7), "rows that divide nodes=7"),
        (lambda: decentralized.random_regular(5, degree=3), "even product"),
        (lambda: decentralized.erdos_renyi(50, probability=0.001), "None of 100 draws"),
        (lambda: decentralized.ring(3).matrices("metropolitan"), "weights"),
        (lambda: decentralized.ring(4).matrices([np.full((4, 4), 0.25)]), "from which it receives no message"),
        (lambda: decentralized.complete(3).matrices([np.full((3, 3), 0.3)]), "not stochastic: row 0 sums to 0.9"),
        (lambda: decentralized.complete(2).matrices([np.array([[2.0, -1], [-1, 2]])]), "at least 0, got -1.0"),
        (lambda: decentralized.complete(2).matrices([np.eye(3)]), r"\[2, 2\], one row per node"),
        (lambda: decentralized.one_peer_exponential(4).matrices([sp.eye_array(4)]), "2 matrices, one per graph, got 1"),
        (lambda: decentralized.exponential(4).matrices("metropolis"), "undirected"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: decentralized.Topology(nx.cycle_graph(4)), r"give Topology\(\[graph\]\)"),
        (lambda: decentralized.Topology([nx.MultiGraph([(0, 1), (0, 1)])]), "give networkx.Graph"),
        (lambda: decentralized.ring(4).matrices(None), "a list of matrices, one per graph, got None"),
        (lambda: decentralized.ring(4).matrices("edges"), "The edges have no weight"),
        (lambda: decentralized.small_world(12, degree=3), "an even degree.*got degree=3"),
        (
            lambda: decentralized.gossip(np.arange(4), decentralized.ring(4), 1),
            "Expected floats to mix, got values of dtype int",
        ),
        (lambda: decentralized.gossip(np.ones(4), nx.cycle_graph(4), 1), "topology"),
    ],
)
def test_misuse_is_refused_with_a_remedy(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse()


def test_edges_are_read_from_a_file(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("0 1 0.5\n1 2 0.25\n")
    (matrix,) = decentralized.edge_list(path).matrices()
    np.testing.assert_allclose(matrix.toarray(), [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]])
    path.write_text("a b\n")
    with pytest.raises(ValueError, match="edges.txt.*two whole numbers"):
        decentralized.edge_list(path)
    with pytest.raises(FileNotFoundError):
        decentralized.edge_list(tmp_path / "missing.txt")
    path.write_text("0 1\n1 2\n")
    assert decentralized.edge_list(path).matrices()[0].toarray()[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    path.write_text("0 1 0.2\n1 2 0.1\n1 0 0.3\n")
    with pytest.raises(ValueError, match=r"edges.txt: The edge \(0, 1\) is there twice"):
        decentralized.edge_list(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0 1\n0,2\n1 2\n", 2),
        ("0 1\n1 2 # 0.5\n", 2),
        ("# ring\n\n0 1\n1\n", 4),
        ("0 1 0.5 7\n", 1),
        ("0 1.0\n", 1),
        ("0 1\n1 2#3\n", 2),
    ],
)
@pytest.mark.parametrize("directed", [False, True])
def test_a_line_that_is_no_edge_is_refused(text, line, directed, tmp_path):
    (tmp_path / "edges.txt").write_text(text)
    with pytest.raises(ValueError, match=f"edges.txt, line {line} is .*separated by spaces"):
        decentralized.edge_list(tmp_path / "edges.txt", directed)


def test_comments_have_their_own_lines_and_a_repeated_edge_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("\ufeff# a path\n0 1\n  # its end\n\n1 2\n", encoding="utf-8")
    assert sorted(decentralized.edge_list(path).graphs[0].edges) == [(0, 1), (1, 2)]
    path.write_text("0 1\n1 0\n1 2\n2 1\n")
    assert len(decentralized.edge_list(path, directed=True).graphs[0].edges) == 4
    with pytest.raises(ValueError, match=r"The edge \(0, 1\) is there twice, in the lines 1 and 2"):
        decentralized.edge_list(path)


def test_a_damaged_file_of_edges_raises_only_value_errors(tmp_path):
    path = tmp_path / "edges.txt"
    whole = "".join(f"{i} {(i + 1) % 12} 0.25\n" for i in range(12)).encode()
    messages = []
    for damaged in mutations(whole, seed=0, count=150):
        path.write_bytes(damaged)
        try:
            decentralized.edge_list(path).matrices()
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 75 and [text for text in messages if "edges.txt" not in text] == []
