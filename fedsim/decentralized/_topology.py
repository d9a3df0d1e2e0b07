"""`Topology`: which nodes send to which, in every round of a period, and with which weights they mix what they receive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import networkx as nx

from fedsim import checks
from fedsim.decentralized._mixing import WEIGHTS, Matrix, Weights, check_stochastic


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """Graphs of the nodes 0 to n - 1, one per round, repeated after the last one.

    An edge of a directed graph is a message from its first node to its second one; an edge of an undirected graph is one in
    each direction. Edges may have a ``weight``, the factor with which the receiver takes the message. In that case all of
    the graph's edges need one, and a node keeps the rest, 1 minus the sum of its weights, of its own value. An edge of weight 0
    is no message, and is removed.

    Attributes:
      graphs: networkx graphs with the same nodes.
      name: for tables and pictures.

    Raises:
      ValueError: there is no graph; the nodes are not 0 to n - 1 or differ between graphs; the union of the graphs is not
        (strongly) connected, so that the nodes could never agree; a weight is missing or outside [0, 1].

    >>> import networkx as nx
    >>> clubs = Topology([nx.barbell_graph(3, 0)], name="two clubs")
    >>> clubs.nodes, clubs.period, clubs.matrices()[0].toarray()[0].round(2).tolist()
    (6, 1, [0.42, 0.33, 0.25, 0.0, 0.0, 0.0])
    """

    graphs: Sequence[nx.Graph]
    name: str = "graph"

    def __post_init__(self) -> None:
        if isinstance(self.graphs, nx.Graph) or any(not isinstance(graph, nx.Graph) for graph in self.graphs):
            raise ValueError("Expected a list of networkx graphs, one per round of a period: give Topology([graph]).")
        if any(graph.is_multigraph() for graph in self.graphs):
            raise ValueError("Expected graphs with one edge between two nodes, got a multigraph: give networkx.Graph(graph).")
        if not self.graphs:
            raise ValueError("Expected at least one graph, got graphs=[]: give [networkx.cycle_graph(8)], for example.")
        object.__setattr__(self, "graphs", [_without_zeros(graph) for graph in self.graphs])
        nodes = set(range(len(self.graphs[0])))
        union = nx.DiGraph()
        union.add_nodes_from(nodes)
        for graph in self.graphs:
            if set(graph) != nodes or not nodes:
                raise ValueError(
                    f"Expected graphs whose nodes are 0 to n - 1, the same in all of them, got {sorted(graph, key=str)[:5]}"
                    "...: use networkx.convert_node_labels_to_integers."
                )
            self._check_weights(graph)
            union.add_edges_from(_messages(graph))
        if not nx.is_strongly_connected(union):
            parts = sorted(map(len, nx.strongly_connected_components(union)), reverse=True)
            raise ValueError(
                f"The topology {self.name!r} is not connected: it falls into {len(parts)} parts of {parts[:5]} nodes, which "
                "would never agree. Add edges, or graphs of other rounds that connect the parts."
            )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.graphs[0])

    @property
    def period(self) -> int:
        """The number of rounds after which the graphs repeat."""
        return len(self.graphs)

    @property
    def is_directed(self) -> bool:
        """Whether some messages go in one direction only."""
        return any(graph.is_directed() for graph in self.graphs)

    def matrices(self, weights: str | Weights | Sequence[Matrix] = "auto") -> list[Matrix]:
        """Returns a mixing matrix ``[nodes, nodes]`` for every graph: in a round, x_i becomes the sum over j of W_ij x_j.

        Args:
          weights: ``"auto"``: those of the edges if they have some, otherwise "metropolis" for undirected graphs and
            "uniform" for directed ones. A name of `WEIGHTS`, a function from a graph to a matrix, or the matrices themselves.

        Raises:
          ValueError: a matrix has entries where the graph has no edge, or negative ones, or neither its rows nor its columns
            sum to 1.
        """
        if not isinstance(weights, str) and not callable(weights):
            if not isinstance(weights, Sequence):
                raise ValueError(f"Expected a name, a function or a list of matrices, one per graph, got {weights!r}.")
            matrices = [Matrix(matrix) for matrix in weights]
            if len(matrices) != self.period:
                raise ValueError(f"Expected {self.period} matrices, one per graph, got {len(matrices)}: repeat or drop some.")
        else:
            matrices = [Matrix(self._rule(weights, graph)(graph)) for graph in self.graphs]
        for matrix, graph in zip(matrices, self.graphs, strict=True):
            matrix.eliminate_zeros()  # They are no messages.
            check_stochastic(matrix, graph)
        return matrices

    def bytes_by_link(self, message_bytes: float, rounds: int) -> dict[tuple[int, int], float]:
        """Returns the bytes of all messages from one node to another, by ``(sender, receiver)``.

        Args:
          message_bytes: the size of a message, such as that of the model.
          rounds: the number of rounds, from the first one of the period.

        >>> import networkx as nx
        >>> Topology([nx.path_graph(3)]).bytes_by_link(100, rounds=2)
        {(0, 1): 200.0, (1, 0): 200.0, (1, 2): 200.0, (2, 1): 200.0}
        """
        checks.whole(0, rounds=rounds)
        checks.number(least=0, message_bytes=message_bytes)
        sent: dict[tuple[int, int], float] = {}
        for number, graph in enumerate(self.graphs):
            times = len(range(number, rounds, self.period))
            for link in _messages(graph):
                if times:
                    sent[link] = sent.get(link, 0) + float(message_bytes) * times
        return dict(sorted(sent.items()))

    def _rule(self, weights: str | Weights, graph: nx.Graph) -> Weights:
        if callable(weights):
            return weights
        if weights == "auto":
            own = nx.get_edge_attributes(graph, "weight")
            weights = "edges" if own else "uniform" if graph.is_directed() else "metropolis"
        checks.one_of("auto", *WEIGHTS, weights=weights)
        return WEIGHTS[weights]

    def _check_weights(self, graph: nx.Graph) -> None:
        own = nx.get_edge_attributes(graph, "weight")
        wrong = [edge for edge, weight in own.items() if not 0 <= weight <= 1]
        if wrong or 0 < len(own) < graph.number_of_edges():
            what = (
                f"edge {wrong[0]} has weight {own[wrong[0]]}" if wrong else f"{len(own)} of {graph.number_of_edges()} have one"
            )
            raise ValueError(f"Expected a weight in [0, 1] for every edge of {self.name!r} or for none, but {what}.")


def _without_zeros(graph: nx.Graph) -> nx.Graph:
    zeros = [edge for edge, weight in nx.get_edge_attributes(graph, "weight").items() if weight == 0]
    if zeros:
        graph = graph.copy()
        graph.remove_edges_from(zeros)
    return graph


def _messages(graph: nx.Graph) -> list[tuple[int, int]]:
    """Returns the pairs of different nodes of which the first one sends to the second one."""
    return [(first, second) for first, second in graph.to_directed().edges if first != second]
