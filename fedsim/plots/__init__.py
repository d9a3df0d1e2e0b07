"""Plots of a population (sizes, labels, examples; each takes a `FederatedData`), of runs and of federated programs.

Every function returns a `matplotlib` figure. Save it by ``figure.savefig("sizes.png")``; a notebook displays it. The functions
need matplotlib (``pip install matplotlib``), do not change its global state, and do not change the data. Colours are those of
Okabe and Ito, which are distinguishable for colour-blind readers, or a colour map that is read by its lightness.
"""

from fedsim.plots._bands import plot_bands as plot_bands
from fedsim.plots._bits import plot_bits as plot_bits
from fedsim.plots._epsilon import plot_epsilon as plot_epsilon
from fedsim.plots._examples import plot_examples as plot_examples
from fedsim.plots._graph import plot_graph as plot_graph
from fedsim.plots._labels import plot_labels as plot_labels
from fedsim.plots._nodes import plot_nodes as plot_nodes
from fedsim.plots._overview import plot_overview as plot_overview
from fedsim.plots._progress import plot_progress as plot_progress
from fedsim.plots._sizes import plot_sizes as plot_sizes
from fedsim.plots._stages import plot_stages as plot_stages
from fedsim.plots._timeline import plot_timeline as plot_timeline
from fedsim.plots._tuning import plot_tuning as plot_tuning
from fedsim.plots._worth import plot_worth as plot_worth
