"""A picture of a graph of nodes: a value of each node, and how much went over each link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.plots._canvas import BLUE, GREY, LIGHTNESS, new_figure

if TYPE_CHECKING:
    import networkx as nx

_MOST_NAMED = 40


def plot_graph(
    graph: nx.Graph, values: Sequence[float] | None = None, links: Mapping[tuple[int, int], float] | None = None,
    label: str = "accuracy",
) -> Any:  # fmt: skip
    """Draws a graph of a `fedsim.decentralized.Topology`, nodes that are close in the graph close to each other.

    Args:
      graph: ``topology.graphs[0]``, for example. A ring is drawn as a circle.
      values: one number per node, which is its colour, such as the accuracy of its own model.
      links: a number per edge in each direction, such as `Topology.bytes_by_link`; the sum of both is the width of the line.
      label: what the values are.

    Returns:
      A matplotlib figure.

    Raises:
      ValueError: ``graph`` is none, there is not one value per node, or ``links`` has none of the graph's edges.

    >>> import networkx as nx
    >>> figure = plot_graph(nx.cycle_graph(4), values=[0.5, 0.6, 0.7, 0.8])
    >>> len(figure.axes[0].texts), figure.axes[1].get_ylabel()
    (4, 'accuracy')
    """
    import networkx as nx  # imports SciPy, too, which other plots need not wait for

    if not isinstance(graph, nx.Graph):
        raise ValueError("Expected a networkx graph, got something else: give topology.graphs[0].")
    nodes = len(graph)
    if values is not None and np.shape(values) != (nodes,):
        raise ValueError(f"Expected {nodes} values, one per node, got shape {list(np.shape(values))}.")
    widths: Any = 0.8
    if links is not None:
        sums = [links.get((i, j), 0) + (0 if graph.is_directed() else links.get((j, i), 0)) for i, j in graph.edges]
        if not any(sums):
            raise ValueError("The links have none of the edges of the graph: give topology.bytes_by_link(...) of its topology.")
        widths = [0.3 + 3.7 * total / max(sums) for total in sums]
    figure = new_figure(6.4 if values is not None else 5.6, 5.2)
    axes = figure.subplots()
    undirected = graph.to_undirected()
    if all(degree == 2 for _, degree in undirected.degree) and nx.is_connected(undirected):
        places = nx.circular_layout(list(nx.dfs_preorder_nodes(undirected, 0)))
    else:
        places = nx.kamada_kawai_layout(graph) if nodes <= 300 else nx.spring_layout(graph, seed=0)
    size = float(np.clip(9000 / nodes, 12, 420))
    nx.draw_networkx_edges(graph, places, ax=axes, width=widths, edge_color=GREY, alpha=0.6, node_size=size)
    colours = {"node_color": BLUE} if values is None else {"node_color": list(values), "cmap": LIGHTNESS}
    drawn = nx.draw_networkx_nodes(
        graph, places, nodelist=range(nodes), ax=axes, node_size=size, edgecolors="white", linewidths=0.8, **colours
    )
    if values is not None:
        figure.colorbar(drawn, ax=axes, label=label, shrink=0.75)
    if nodes <= _MOST_NAMED:
        # The name has the colour that differs most from that of its node.
        middle = None if values is None else (min(values) + max(values)) / 2
        for node, place in places.items():
            dark = values is None or values[node] <= middle
            axes.text(*place, str(node), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_axis_off()
    axes.set_aspect("equal")
    return figure
