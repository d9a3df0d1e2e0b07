"""Topologies by name. networkx makes the graphs that it knows.

- Static and one-peer exponential graphs: B. Ying, K. Yuan, Y. Chen, H. Hu, P. Pan, W. Yin, "Exponential graph is provably
  efficient for decentralized deep training", NeurIPS 2021, https://arxiv.org/abs/2110.13363.
- EquiTopo: Z. Song, W. Li, K. Jin, L. Shi, M. Yan, W. Yin, K. Yuan, "Communication-efficient topologies for decentralized
  learning with O(1) consensus rate", NeurIPS 2022, https://arxiv.org/abs/2210.07881.
- Base-(k+1) graphs: see `fedsim.decentralized.base_graph`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import networkx as nx
import numpy as np

from fedsim import checks
from fedsim.data import FormatError
from fedsim.decentralized._base_graph import base_graph
from fedsim.decentralized._topology import Topology
from fedsim.text_files import read_text

_MOST_DRAWS = 100


def ring(nodes: int) -> Topology:
    """Every node has two neighbours.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> ring(5).graphs[0].degree[3]
    2
    """
    checks.whole(1, nodes=nodes)
    return Topology([nx.cycle_graph(nodes)], f"ring of {nodes}")


def torus(nodes: int, rows: int | None = None) -> Topology:
    """A two-dimensional grid whose ends are connected: every node has four neighbours, or fewer with two rows or columns.

    Args:
      nodes: the number of nodes.
      rows: a divisor of ``nodes``; None: the largest one up to the square root.

    Raises:
      ValueError: ``rows`` does not divide ``nodes``, or there are fewer than two rows or columns.

    >>> torus(12).graphs[0].number_of_edges()
    24
    """
    checks.whole(1, nodes=nodes)
    checks.whole(1, nodes, or_none=True, rows=rows)
    if rows is None:
        rows = max(divisor for divisor in range(1, math.isqrt(nodes) + 1) if nodes % divisor == 0)
    if nodes % rows or min(rows, nodes // rows) < 2:
        raise ValueError(
            f"Expected rows that divide nodes={nodes} into at least two rows and two columns, got rows={rows}: give a number "
            "of nodes that is a product, such as 16, or use a ring."
        )
    grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
    return Topology([nx.convert_node_labels_to_integers(grid)], f"torus of {rows} x {nodes // rows}")


def complete(nodes: int) -> Topology:
    """All nodes are neighbours, so that a round averages exactly.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> complete(4).graphs[0].number_of_edges()
    6
    """
    checks.whole(1, nodes=nodes)
    return Topology([nx.complete_graph(nodes)], f"complete graph of {nodes}")


def star(nodes: int) -> Topology:
    """Node 0 is the neighbour of all others.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> star(4).graphs[0].degree[0]
    3
    """
    checks.whole(1, nodes=nodes)
    return Topology([nx.star_graph(nodes - 1)], f"star of {nodes}")


def line(nodes: int) -> Topology:
    """The nodes in a row.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> line(4).graphs[0].number_of_edges()
    3
    """
    checks.whole(1, nodes=nodes)
    return Topology([nx.path_graph(nodes)], f"line of {nodes}")


def binary_tree(nodes: int) -> Topology:
    """Node i is the neighbour of nodes 2 i + 1 and 2 i + 2.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> sorted(binary_tree(6).graphs[0].edges)
    [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)]
    """
    checks.whole(1, nodes=nodes)
    return Topology([nx.full_rary_tree(2, nodes)], f"binary tree of {nodes}")


def hypercube(nodes: int) -> Topology:
    """Nodes whose numbers differ in one binary digit are neighbours.

    Raises:
      ValueError: ``nodes`` is not a power of two.

    >>> sorted(hypercube(8).graphs[0][5])
    [1, 4, 7]
    """
    checks.whole(1, nodes=nodes)
    dimensions = nodes.bit_length() - 1
    if nodes != 1 << dimensions:
        raise ValueError(
            f"A hypercube has a power of two of nodes, got nodes={nodes}: give {1 << dimensions} or {2 << dimensions}."
        )
    graph: nx.Graph = nx.empty_graph(nodes)
    graph.add_edges_from((node, node ^ 1 << bit) for node in range(nodes) for bit in range(dimensions))
    return Topology([graph], f"hypercube of {nodes}")


def exponential(nodes: int) -> Topology:
    """Static exponential graph: node i sends to i + 1, i + 2, i + 4, ... modulo ``nodes``, all smaller shifts than ``nodes``.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> sorted(exponential(6).graphs[0].successors(0))
    [1, 2, 4]
    """
    checks.whole(1, nodes=nodes)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, (i + shift) % nodes) for shift in _powers(nodes) for i in range(nodes))
    return Topology([graph], f"exponential graph of {nodes}")


def one_peer_exponential(nodes: int) -> Topology:
    """In round t, node i sends to i + 2^t modulo ``nodes`` only; after log2(nodes) rounds the shifts repeat.

    With a power of two of nodes, a period averages exactly.

    Raises:
      ValueError: ``nodes`` is not a positive whole number.

    >>> topology = one_peer_exponential(8)
    >>> topology.period, [sorted(graph.successors(0)) for graph in topology.graphs]
    (3, [[1], [2], [4]])
    """
    checks.whole(1, nodes=nodes)
    graphs = [_shifted(nodes, shift, 0.5) for shift in _powers(nodes)] or [nx.empty_graph(1)]
    return Topology(graphs, f"one-peer exponential graphs of {nodes}")


def random_regular(nodes: int, degree: int = 4, seed: int = 0) -> Topology:
    """A random graph in which every node has ``degree`` neighbours.

    Raises:
      ValueError: ``degree`` is not below ``nodes``, or there is no such graph because nodes x degree is odd.

    >>> set(dict(random_regular(10, degree=3).graphs[0].degree).values())
    {3}
    """
    checks.whole(1, nodes=nodes, degree=degree)
    if degree >= nodes or nodes * degree % 2:
        raise ValueError(f"Expected degree < nodes with an even product, got degree={degree}, nodes={nodes}: change one by 1.")
    return _drawn(
        f"random graph of {nodes} with degree {degree}", seed, functools.partial(nx.random_regular_graph, degree, nodes)
    )


def erdos_renyi(nodes: int, probability: float = 0.3, seed: int = 0) -> Topology:
    """Every pair of nodes are neighbours with a probability.

    Raises:
      ValueError: ``nodes`` is not a positive whole number, or ``probability`` is not in ``(0, 1]``.

    >>> erdos_renyi(10, probability=0.5, seed=1).graphs[0].number_of_edges()
    22
    """
    checks.whole(1, nodes=nodes)
    checks.number(above=0, most=1, probability=probability)
    return _drawn(f"random graph of {nodes}", seed, functools.partial(nx.fast_gnp_random_graph, nodes, probability))


def small_world(nodes: int, degree: int = 4, rewiring: float = 0.3, seed: int = 0) -> Topology:
    """Watts and Strogatz: a ring in which every node has ``degree`` neighbours, and edges are rewired with a probability.

    Raises:
      ValueError: ``nodes`` is less than 3, ``degree`` is odd or not in ``[2, nodes - 1]``, or ``rewiring`` is not in ``[0,
        1]``.

    >>> small_world(12, degree=4).graphs[0].number_of_edges()
    24
    """
    checks.whole(3, nodes=nodes)
    checks.whole(2, nodes - 1, degree=degree)
    if degree % 2:
        raise ValueError(f"Expected an even degree, half of it on either side, got degree={degree}.")
    checks.number(least=0, most=1, rewiring=rewiring)
    return _drawn(f"small world of {nodes}", seed, functools.partial(nx.watts_strogatz_graph, nodes, degree, rewiring))


def scale_free(nodes: int, edges: int = 2, seed: int = 0) -> Topology:
    """Barabási and Albert: nodes come one after another, each with ``edges`` neighbours, mostly those that have many already.

    Raises:
      ValueError: ``nodes`` is less than 2, or ``edges`` is not in ``[1, nodes - 1]``.

    >>> scale_free(10, edges=2).graphs[0].number_of_edges()
    16
    """
    checks.whole(2, nodes=nodes)
    checks.whole(1, nodes - 1, edges=edges)
    return _drawn(f"scale-free graph of {nodes}", seed, functools.partial(nx.barabasi_albert_graph, nodes, edges))


def equi_static(nodes: int, shifts: int = 2, directed: bool = True, seed: int = 0) -> Topology:
    """D-EquiStatic and U-EquiStatic: every node sends to those at some random distances around a ring.

    W = (1 / M) sum of A(u) over the distances u, where A(u) takes the value of the node at the distance u with weight
    (n - 1) / n and the own one with 1 / n; undirected: the mean of W and its transpose.

    Args:
      nodes: n.
      shifts: M, the number of distances, drawn without replacement.
      directed: D-EquiStatic; otherwise U-EquiStatic.
      seed: of the distances.

    Raises:
      ValueError: there are not so many distances, or none of 100 draws is connected.

    >>> equi_static(9, shifts=3, seed=1).graphs[0].out_degree[4]
    3
    """
    checks.whole(2, nodes=nodes)
    checks.whole(1, nodes - 1, shifts=shifts)
    checks.truth(directed=directed)

    def draw(seed: int) -> nx.Graph:
        distances = np.random.default_rng(seed).choice(np.arange(1, nodes), shifts, replace=False)
        matrix = (
            sum(nx.to_numpy_array(_shifted(nodes, int(u), 1 - 1 / nodes), nodelist=range(nodes)) for u in distances) / shifts
        )
        if directed:
            return nx.from_numpy_array(matrix, create_using=nx.DiGraph)
        return nx.from_numpy_array((matrix + matrix.T) / 2)

    kind = "D" if directed else "U"
    return _drawn(f"{kind}-EquiStatic graph of {nodes}", seed, draw)


def equi_dynamic(nodes: int, period: int = 100, eta: float = 0.5, directed: bool = True, seed: int = 0) -> Topology:
    """OD-EquiDyn and OU-EquiDyn: in every round each node has one peer at a random distance around a ring.

    W = (1 - eta) I + eta A(u), see `equi_static`. Undirected: from a random first node on, nodes that are free are paired with
    the node at the distance u, if that is free, too. The graphs of ``period`` rounds are drawn beforehand and repeat.

    Args:
      nodes: n.
      period: the number of rounds.
      eta: in (0, 1].
      directed: OD-EquiDyn; otherwise OU-EquiDyn.
      seed: of the distances.

    Raises:
      ValueError: an argument is out of its range.

    >>> topology = equi_dynamic(9, period=20, directed=False)
    >>> topology.period, max(dict(topology.graphs[0].degree).values())
    (20, 1)
    """
    checks.whole(2, nodes=nodes)
    checks.whole(1, period=period)
    checks.number(above=0, most=1, eta=eta)
    checks.truth(directed=directed)
    checks.whole(0, seed=seed)
    generator = np.random.default_rng(seed)

    def draw() -> nx.Graph:
        shift, weight = int(generator.integers(1, nodes)), eta * (1 - 1 / nodes)
        if directed:
            return _shifted(nodes, shift, weight)
        graph: nx.Graph = nx.empty_graph(nodes)
        for i in np.roll(np.arange(nodes), -int(generator.integers(nodes))).tolist():
            if graph.degree[i] == 0 == graph.degree[(i + shift) % nodes]:
                graph.add_edge(i, (i + shift) % nodes, weight=weight)
        return graph

    return Topology([draw() for _ in range(period)], f"{'OD' if directed else 'OU'}-EquiDyn graphs of {nodes}")


def edge_list(path: str | os.PathLike[str], directed: bool = False) -> Topology:
    """Reads a graph from a file with one edge per line, ``0 1`` or ``0 1 0.25`` with a weight.

    Lines that are empty or begin with ``#`` are skipped.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file has another form or an edge twice, or the graph is not connected. The message names the file and, if
        it concerns one, the line.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "edges.txt"
    >>> _ = path.write_text("0 1\\n1 2\\n")
    >>> edge_list(path).nodes
    3
    """
    graph: nx.Graph = nx.DiGraph() if directed else nx.Graph()
    lines: dict[tuple[int, int], int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        where = f"{os.fspath(path)}, line {number}"
        try:
            if len(fields) > 3:
                raise ValueError
            edge = int(fields[0]), int(fields[1])
            weight = {"weight": float(fields[2])} if len(fields) == 3 else {}
        except (ValueError, IndexError):
            raise FormatError(
                f"{where} is {line.strip()[:60]!r}. Write an edge per line, two whole numbers and perhaps a weight, separated "
                "by spaces, and comments in their own lines, which begin with #."
            ) from None
        if graph.has_edge(*edge):
            first = edge if edge in lines else edge[::-1]
            raise FormatError(
                f"{os.fspath(path)}: The edge {first} is there twice, in the lines {lines[first]} and {number}: leave one out."
            )
        lines[edge] = number
        graph.add_edge(*edge, **weight)
    try:
        return Topology([graph], f"edges of {os.path.basename(path)}")
    except ValueError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None


TOPOLOGIES: Mapping[str, Callable[..., Topology]] = {
    function.__name__: function
    for function in (
        ring, torus, complete, star, line, binary_tree, hypercube, exponential, one_peer_exponential, random_regular,
        erdos_renyi, small_world, scale_free, equi_static, equi_dynamic, base_graph,
    )
}  # fmt: skip


def _drawn(name: str, seed: int, draw: Callable[..., Any]) -> Topology:
    """Returns the first connected graph of some draws."""
    checks.whole(0, seed=seed)
    for attempt in range(_MOST_DRAWS):
        # With seed + attempt, neighbouring seeds would often give the same graph.
        own = np.random.SeedSequence([seed, attempt]).generate_state(1)[0] if attempt else seed
        try:
            return Topology([draw(seed=int(own))], name)
        except ValueError as error:
            if "not connected" not in str(error):
                raise
    raise ValueError(f"None of {_MOST_DRAWS} draws of a {name} is connected: give more edges.")


def _powers(nodes: int) -> list[int]:
    return [1 << bit for bit in range((nodes - 1).bit_length())]


def _shifted(nodes: int, shift: int, weight: float) -> nx.DiGraph:
    """Returns a graph in which every node sends to the node at a distance around a ring."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(((i, (i + shift) % nodes) for i in range(nodes)), weight=weight)
    return graph
