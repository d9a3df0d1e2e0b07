"""Pictures of a population (sizes, labels, examples: each takes a `FederatedData`) and of runs: a `matplotlib` figure each.

They need matplotlib (``pip install matplotlib``), read only, and touch no global state of it: save a figure by
``figure.savefig("sizes.png")``; in a notebook it shows itself. Colours are Okabe and Ito's, which colour-blind people can
tell apart, or one colour whose lightness counts.
"""

from fedsim.plots._bits import plot_bits as plot_bits
from fedsim.plots._examples import plot_examples as plot_examples
from fedsim.plots._labels import plot_labels as plot_labels
from fedsim.plots._overview import plot_overview as plot_overview
from fedsim.plots._sizes import plot_sizes as plot_sizes
