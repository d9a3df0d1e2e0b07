"""Mixing weights, and what can be said about them: stochasticity, spectral gap, exact consensus.

Metropolis–Hastings weights: L. Xiao, S. Boyd, "Fast linear iterations for distributed averaging", Systems & Control Letters
53, 2004. Column-stochastic weights for push-sum: D. Kempe, A. Dobra, J. Gehrke, "Gossip-based computation of aggregate
information", FOCS 2003.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import networkx as nx
import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg

from fedsim import checks

Matrix: TypeAlias = sp.csr_array
Weights: TypeAlias = Callable[[nx.Graph], Matrix]

TOLERANCE = 1e-8
_DENSE_NODES = 1000


def metropolis(graph: nx.Graph) -> Matrix:
    """Returns W_ij = 1 / (1 + max(degree of i, degree of j)) for neighbours, which is symmetric and doubly stochastic.

    Raises:
      ValueError: the graph is directed.

    >>> metropolis(nx.path_graph(3)).toarray().round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    if graph.is_directed():
        raise ValueError(
            "Metropolis weights need an undirected graph, got a directed one: use 'uniform' or 'column_stochastic'."
        )
    adjacency = _adjacency(graph)
    degree = adjacency.sum(axis=1)
    entries = adjacency.tocoo()
    weights = 1 / (1 + np.maximum(degree[entries.row], degree[entries.col]))
    return _with_rest(Matrix((weights, (entries.row, entries.col)), shape=adjacency.shape))


def uniform(graph: nx.Graph) -> Matrix:
    """Returns W_ij = 1 / (1 + number of nodes that send to i), also for i itself.

    Rows sum to 1, and in regular graphs columns, too.

    >>> uniform(nx.path_graph(3)).toarray().round(3).tolist()
    [[0.5, 0.5, 0.0], [0.333, 0.333, 0.333], [0.0, 0.5, 0.5]]
    """
    taken = _with_own(_adjacency(graph))
    return Matrix(sp.diags_array(1 / taken.sum(axis=1)) @ taken)


def column_stochastic(graph: nx.Graph) -> Matrix:
    """Returns W_ij = 1 / (1 + number of nodes to which j sends), so that columns sum to 1, for push-sum.

    >>> column_stochastic(nx.path_graph(3)).toarray().round(3).tolist()
    [[0.5, 0.333, 0.0], [0.5, 0.333, 0.5], [0.0, 0.333, 0.5]]
    """
    taken = _with_own(_adjacency(graph))
    return Matrix(taken @ sp.diags_array(1 / taken.sum(axis=0)))


def edge_weights(graph: nx.Graph) -> Matrix:
    """Returns the weights of the edges; a node keeps the rest of its own value.

    Raises:
      ValueError: the edges have no weights.

    >>> graph = nx.Graph()
    >>> graph.add_edge(0, 1, weight=0.25)
    >>> edge_weights(graph).toarray().tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    if graph.number_of_edges() and not nx.get_edge_attributes(graph, "weight"):
        raise ValueError("The edges have no weight: set them, or use 'metropolis'.")
    return _with_rest(_adjacency(graph, weight="weight"))


def lazy(weights: Weights, keep: float = 0.5) -> Weights:
    """Returns weights that keep a part of a node's own value: ``keep`` I + (1 - ``keep``) W, which has no eigenvalue -1.

    Args:
      weights: the function from a graph to W, such as `metropolis`.
      keep: in [0, 1).

    Raises:
      ValueError: ``keep`` is not in ``[0, 1)``.

    >>> lazy(metropolis)(nx.path_graph(2)).toarray().tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    checks.number(least=0, below=1, keep=keep)
    return lambda graph: Matrix(keep * sp.eye_array(len(graph)) + (1 - keep) * weights(graph))


WEIGHTS: dict[str, Weights] = {
    "metropolis": metropolis,
    "uniform": uniform,
    "lazy": lazy(metropolis),
    "column_stochastic": column_stochastic,
    "edges": edge_weights,
}


def check_stochastic(matrix: Matrix, graph: nx.Graph) -> None:
    """Raises ``ValueError`` unless the rows or the columns of a matrix sum to 1, without entries where there is no edge."""
    nodes = len(graph)
    if matrix.shape != (nodes, nodes):
        raise ValueError(f"Expected a mixing matrix [{nodes}, {nodes}], one row per node, got {list(matrix.shape)}.")
    entries = matrix.tocoo()
    if len(entries.data) and (not np.isfinite(entries.data).all() or entries.data.min() < -TOLERANCE):
        raise ValueError(f"Expected mixing weights of at least 0, got {entries.data.min()}: give finite numbers of at least 0.")
    support = _with_own(_adjacency(graph)) != 0
    outside = (matrix - matrix.multiply(support)).tocoo()
    if outside.nnz and outside.data.max() > TOLERANCE:
        place = int(outside.data.argmax())
        i, j, weight = outside.row[place], outside.col[place], outside.data[place]
        raise ValueError(
            f"The mixing matrix gives node {i} the weight {weight:.4g} for node {j}, from which it receives no message: add "
            "the edge to the graph, or set the weight to 0."
        )
    off = [np.abs(matrix.sum(axis=axis) - 1) for axis in (1, 0)]
    if min(values.max() for values in off) > TOLERANCE:
        row = int(off[0].argmax())
        raise ValueError(
            f"The mixing matrix is not stochastic: row {row} sums to {matrix.sum(axis=1)[row]:.6g}, and its columns do not sum "
            "to 1 either. Divide each row by its sum, or each column for push-sum."
        )


def is_doubly_stochastic(matrix: Matrix) -> bool:
    """Returns whether rows and columns sum to 1, so that mixing keeps the mean of all nodes.

    >>> is_doubly_stochastic(metropolis(nx.path_graph(3))), is_doubly_stochastic(uniform(nx.path_graph(3)))
    (True, False)
    """
    return all(bool(np.abs(matrix.sum(axis=axis) - 1).max() <= TOLERANCE) for axis in (0, 1))


def spectral_gap(matrix: Matrix) -> float:
    """Returns 1 minus the second largest absolute eigenvalue: mixing shrinks the distance to consensus by that per round.

    >>> round(spectral_gap(metropolis(nx.cycle_graph(16))), 6)  # (2/3) (1 - cos(2 pi / 16))
    0.050747
    """
    nodes = matrix.shape[0]
    if nodes <= 1:
        return 1.0
    if nodes <= _DENSE_NODES:
        values = np.linalg.eigvals(matrix.toarray())
    else:
        values = scipy.sparse.linalg.eigs(
            matrix, k=4, which="LM", return_eigenvectors=False, v0=np.ones(nodes) + np.arange(nodes)
        )
    magnitudes = np.sort(np.abs(values))[::-1]
    return float(max(0.0, 1 - magnitudes[1]))


def consensus_error(matrices: Sequence[Matrix]) -> float:
    """Returns the largest absolute difference between the product of a period's matrices and that of exact averaging.

    It is 0, but for rounding, if the nodes agree on their mean after one period.

    >>> consensus_error([metropolis(nx.complete_graph(4))]) < 1e-15, round(consensus_error([metropolis(nx.cycle_graph(4))]), 3)
    (True, 0.25)
    """
    nodes = matrices[0].shape[0]
    product = np.eye(nodes)
    for matrix in matrices:
        product = matrix @ product
    return float(np.abs(product - 1 / nodes).max())


def _adjacency(graph: nx.Graph, weight: str | None = None) -> Matrix:
    """Returns a matrix with an entry (i, j) for each message from j to i."""
    adjacency = nx.to_scipy_sparse_array(graph, nodelist=range(len(graph)), weight=weight, dtype=np.float64, format="csr")
    adjacency = Matrix(adjacency.T)
    adjacency.setdiag(0)  # A node always has its own value.
    adjacency.eliminate_zeros()
    return adjacency


def _with_own(adjacency: Matrix) -> Matrix:
    """Adds an entry for the value that every node has itself."""
    return Matrix(adjacency + sp.eye_array(adjacency.shape[0]))


def _with_rest(matrix: Matrix) -> Matrix:
    """Adds to the diagonal what the rows lack of 1."""
    return Matrix(matrix + sp.diags_array(1 - matrix.sum(axis=1)))
