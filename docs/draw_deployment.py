"""Draws the picture of docs/deployment.md, the messages of one round. Run ``python docs/draw_deployment.py``."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Title and position of each process; those of node 1 stand for all nodes.
PROCESSES = {
    "fedsim deploy\n(server's part)": 0,
    "ServerApp": 1.9,
    "SuperLink": 3.4,
    "SuperNode 0": 5.2,
    "ClientApp": 6.7,
    "worker of node 0": 8.7,
}
# From, to, the line on which it is, and the text.
MESSAGES = [
    (0, 1, 0.6, "model; keys and sizes\nof the node's clients"),
    (1, 2, 1, "message"),
    (3, 2, 2, "asks every 3 s"),
    (2, 3, 3, "message"),
    (3, 4, 4, "starts a process"),
    (4, 5, 5, "passes it on"),
    (5, 4, 8.6, "sum of the updates;\nweight and loss of each"),
    (4, 3, 9.4, "reply"),
    (3, 2, 10, "reply"),
    (1, 2, 11, "asks every 0.1 s"),
    (2, 1, 12, "reply"),
    (1, 0, 13, "reply"),
]
LAST = 15.2


def main() -> None:
    """Draws docs/deployment/round.png."""
    figure, axes = plt.subplots(figsize=(11, 7))
    places = list(PROCESSES.values())
    for name, place in PROCESSES.items():
        axes.plot([place, place], [0, LAST], color="0.75", zorder=0)
        axes.text(place, -0.5, name, ha="center", va="bottom", fontsize=10, weight="bold")
    for start, end, line, text in MESSAGES:
        y, asks = 0.8 + line, text.startswith("asks")
        arrow = {"arrowstyle": "->", "linestyle": "--" if asks else "-", "color": "0.5" if asks else "C0"}
        axes.annotate("", (places[end], y), (places[start], y), arrowprops=arrow)
        axes.text((places[start] + places[end]) / 2, y - 0.08, text, ha="center", va="bottom", fontsize=9)
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "C1"}
    axes.text(places[-1], 7, "runs its clients,\none after another", ha="center", va="center", fontsize=9, bbox=box)
    axes.text(places[0], 14.7, "adds the sums of\nall nodes", ha="center", va="center", fontsize=9, bbox=box)
    axes.axvline(4.3, color="C3", linestyle=":")
    axes.text(4.3, LAST + 1, "network", ha="center", va="top", fontsize=9, color="C3")
    axes.text(6.7, LAST + 0.2, "the node's machine: examples and memories stay here", ha="center", va="top", fontsize=9)
    axes.text(1.7, LAST + 0.2, "the server's machine", ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.9, 9.7), ylim=(LAST + 1.2, -1.6))
    axes.axis("off")
    figure.savefig(
        Path(__file__).with_name("deployment") / "round.png", dpi=100, bbox_inches="tight", metadata={"Software": None}
    )


if __name__ == "__main__":
    main()
