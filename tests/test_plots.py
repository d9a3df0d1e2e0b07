"""Plots show the data, and work for the smallest and the largest populations."""

import builtins
import dataclasses
import io
import itertools
import re

import networkx as nx
import numpy as np
import pytest
from IPython.core.formatters import PNGFormatter

import fedsim
from fedsim import plots
from fedsim.data import FederatedData
from fedsim.experiment import _report


def population(clients, classes=10, seed=0):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 40, clients)
    rows = int(sizes.sum())
    x = draw.integers(0, 255, [rows, 6, 6, 1]).astype(np.uint8)
    return FederatedData.from_arrays({"x": x, "y": draw.integers(0, classes, rows)}, sizes=sizes)


def png(figure):
    file = io.BytesIO()
    figure.savefig(file)
    return file.getvalue()


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.mark.parametrize("clients", [1, 100, 3400])
def test_the_histogram_counts_every_client_once(clients):
    data = population(clients)
    figure = plots.plot_sizes(data)
    (axes,) = figure.axes
    assert sum(bar.get_height() for bar in axes.patches) == clients
    assert axes.get_title().startswith(f"{clients:,} clients, {data.num_examples:,} examples")
    assert png(figure)[:4] == b"\x89PNG"


def test_the_histogram_of_a_long_tail_is_logarithmic_and_counts_empty_clients():
    sizes = [0, 0, *[1] * 50, *[2] * 20, 5000]
    axes = plots.plot_sizes(FederatedData.from_arrays({"x": np.zeros(sum(sizes))}, sizes=sizes)).axes[0]
    assert axes.get_xscale() == "log"
    assert sum(bar.get_height() for bar in axes.patches) == 71
    assert "2 clients without examples" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert axes.patches[0].get_height() == 50


def test_a_population_of_empty_clients_has_only_a_plot_of_sizes():
    data = FederatedData.from_arrays({"x": np.zeros(0), "y": np.zeros(0, int)}, sizes=[0, 0])
    assert "2 clients without examples" in texts(plots.plot_sizes(data))
    assert png(plots.plot_overview(data))
    for plot in (plots.plot_labels, plots.plot_examples):
        with pytest.raises(ValueError, match="nothing to draw"):
            plot(data)


def test_bubbles_have_areas_in_proportion_to_shares():
    data = FederatedData.from_arrays({"y": [0, 0, 0, 1, 1, 1]}, sizes=[4, 2])
    figure = plots.plot_labels(data)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"{n}% of a client's examples" for n in (100, 10)]
    axes = figure.axes[0]
    offsets, areas = axes.collections[0].get_offsets(), axes.collections[0].get_sizes()
    drawn = {(int(column), int(row)): area for (column, row), area in zip(offsets, areas, strict=True)}
    # Row 0 is the population; the shares of label 0 in the rows are 1/2, 3/4 and 0.
    assert drawn.keys() == {(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)}
    assert drawn[0, 0] / drawn[1, 2] == pytest.approx(0.5)
    assert drawn[0, 1] / drawn[1, 2] == pytest.approx(0.75)


def test_hidden_labels_have_a_column_and_do_not_count_in_the_distance():
    data = FederatedData.from_arrays({"y": [-1, 0, 1, -1, 1, 1]}, sizes=[4, 2])
    axes = plots.plot_labels(data, names=["cat", "dog"]).axes[0]
    assert axes.get_title() == "Labels of all clients; mean L1 distance to the population 0.50"  # (1/4, 3/4); 1/2 for both
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["-1", "cat", "dog"]
    hidden = FederatedData.from_arrays({"y": [-1, -1]}, sizes=[2])
    with pytest.raises(ValueError, match="All labels are -1"):
        plots.plot_labels(hidden)
    assert len(plots.plot_overview(hidden, title="hidden").subfigs) == 1


@pytest.mark.first(3)
@pytest.mark.parametrize(("clients", "shown"), [(100, 10), (100, 100), (3400, 10), (3400, 3400)])
def test_labels_of_few_and_of_many_clients(clients, shown):
    data = population(clients, classes=62)
    figure = plots.plot_labels(data, clients=shown, names=[f"class {i}" for i in range(62)])
    assert png(figure)[:4] == b"\x89PNG"
    written = texts(figure)
    assert any(
        text.startswith(f"Labels of {'all' if clients == shown else f'{shown:,} of {clients:,}'} clients") for text in written
    )
    assert "class 61" in written


def test_a_heat_map_has_the_population_above_the_clients():
    data = FederatedData.from_arrays({"y": [0, 1] * 40}, sizes=[2] * 40)
    picture = plots.plot_labels(data, clients=40).axes[0].images[0].get_array()
    np.testing.assert_array_equal(picture[0], [0.5, 0.5])
    np.testing.assert_array_equal(picture[-40:], np.full([40, 2], 0.5))


def test_the_most_frequent_of_many_labels_are_shown():
    y = np.concatenate([np.arange(300), np.repeat(np.arange(200, 300), 3)])
    figure = plots.plot_labels(FederatedData.from_arrays({"y": y}, sizes=[300, 300]))
    written = texts(figure)
    assert any("the 100 most frequent of 300 labels" in text for text in written)
    assert "298" in written and "198" not in written


def test_named_clients_are_the_ones_that_are_shown():
    data = population(20)
    rows = plots.plot_labels(data, clients=["7", "3"]).axes[0].get_yticklabels()
    assert [row.get_text() for row in rows] == ["all clients", f"7 ({data.sizes[7]})", f"3 ({data.sizes[3]})"]
    with pytest.raises(KeyError, match="No client 'unknown'"):
        plots.plot_examples(data, clients=["unknown"])


def test_images_are_shown_as_they_are():
    data = population(3)
    figure = plots.plot_examples(data, clients=["1"], examples=2)
    shown = [axes.images[0].get_array() for axes in figure.axes]
    np.testing.assert_array_equal(shown, data["1"]["x"][:2, :, :, 0])
    assert [axes.get_title() for axes in figure.axes] == [str(label) for label in data["1"]["y"][:2]]
    colour = FederatedData.from_arrays({"x": np.random.default_rng(0).normal(size=(4, 8, 8, 3))}, sizes=[2, 2])
    assert png(plots.plot_examples(colour))


def test_text_is_shown_and_tokens_are_decoded():
    lines = np.array([b"to be,\nor not", b"", "caf\u00e9 $x^$".encode(), b"\xff"], object)
    written = texts(plots.plot_examples(FederatedData.from_arrays({"x": lines}, sizes=[4])))
    lines = [line for line in written if line.startswith("  ")]
    assert lines == ["  to be, or not", "  (empty)", r"  café \$x^\$", "  \ufffd"]
    tokens = FederatedData.from_arrays({"x": np.array([[1, 2], [2, 0]])}, sizes=[2])
    figure = plots.plot_examples(tokens, decode=lambda ids: " ".join("_ab"[i] for i in ids))
    assert {"  a b", "  b _"} <= set(texts(figure))
    assert png(figure)


@pytest.mark.parametrize("x", [np.zeros([6, 60], np.float32), np.arange(6.0), np.zeros([6, 4, 2, 2, 2]), np.zeros([6, 1, 5])])
def test_numbers_that_are_not_images_are_drawn_as_strips(x):
    assert png(plots.plot_examples(FederatedData.from_arrays({"x": x, "y": np.linspace(0, 1, 6)}, sizes=[5, 1])))


def test_an_overview_omits_plots_without_data():
    class Splits:
        train, test = population(5), population(4)

    assert len(plots.plot_overview(Splits(), title="both").subfigs) == 3
    no_labels = FederatedData.from_arrays({"x": np.zeros([6, 3]), "y": np.zeros([6, 3], int)}, sizes=[5, 1])
    assert len(plots.plot_overview(no_labels).subfigs) == 2
    only_labels = FederatedData.from_arrays({"y": np.zeros(6, int)}, sizes=[5, 1])
    figure = plots.plot_overview(only_labels)
    assert len(figure.subfigs) == 2
    assert png(figure)


def test_names_with_dollar_signs_are_not_formulas():
    text = {"x": np.array([b"$x_{$", b"\\$"], object), "y": np.array(["$_{$", "a"])}
    data = FederatedData.from_clients({"$_{$": text, "$$": text})
    shown = texts(plots.plot_labels(data))
    assert r"\$_{\$ (2)" in shown
    assert png(plots.plot_labels(data))
    assert png(plots.plot_overview(data))


def test_labels_beyond_the_names_are_shown_as_they_are():
    data = FederatedData.from_arrays({"x": np.zeros([3, 4]), "y": [-1, 0, 7]}, sizes=[1, 2])
    assert [tick.get_text() for tick in plots.plot_labels(data, names=["cat"]).axes[0].get_xticklabels()] == ["-1", "cat", "7"]
    assert png(plots.plot_examples(data, names=["cat"]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("x", [np.zeros([3, 0]), np.array([[np.nan], [np.inf], [1]])])
def test_nonfinite_numbers_and_empty_clients_are_drawn(x):
    assert png(plots.plot_examples(FederatedData.from_arrays({"x": x}, sizes=[0, 3]), clients=["0", "1"]))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda data: plots.plot_labels(data, "z"), "no feature 'z'"),
        (lambda data: plots.plot_labels(data, "x"), "one whole number or name per example"),
        (lambda data: plots.plot_labels(data, clients=0), "Expected clients >= 1, got clients=0"),
        (lambda data: plots.plot_labels(data, clients=[]), "nothing to draw: none of the given clients"),
        (lambda data: plots.plot_examples(data, "z"), "no feature 'z'"),
        (lambda data: plots.plot_examples(data, examples=0), "Expected examples >= 1, got examples=0"),
    ],
)
def test_invalid_arguments_are_refused(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse(population(3))


def test_a_notebook_displays_a_figure_without_pyplot():
    shown = PNGFormatter()(plots.plot_sizes(population(2)))
    assert shown.startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plots.plot_sizes(population(2))


def test_a_timeline_shows_every_dispatch_its_version_and_its_outcome():
    sampler = fedsim.UniformSampler(FederatedData.from_arrays({"x": np.zeros(6)}, sizes=[1] * 6), clients=2, seed=0)
    faults = fedsim.systems.FaultSchedule({1: fedsim.systems.Fault(failure=0.5)})
    schedule = fedsim.systems.schedule(sampler, 4, steps=np.arange(6) + 1, faults=faults)
    axes, _ = plots.plot_timeline(schedule, client_ids=list("abcdef")).axes
    bars = axes.containers[0].patches
    assert sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars) == sorted(
        zip(schedule.timeline.start, schedule.timeline.stop, strict=True)
    )
    names = [label.get_text() for label in axes.get_yticklabels()]
    order = np.argsort(schedule.timeline.number)
    assert names == list(dict.fromkeys("abcdef"[client] for client in schedule.timeline.client[order]))
    marks = {line.get_label(): line.get_xdata().tolist() for line in axes.lines}
    assert set(marks) == {"aggregated", "lost"} and len(marks["lost"]) == 1
    assert len(marks["aggregated"]) == schedule.totals.aggregated == 8
    # The bars have as many colours as there are versions.
    assert len({bar.get_facecolor() for bar in bars}) == len(set(schedule.timeline.version.tolist())) == 4
    assert png(plots.plot_timeline(schedule, clients=2, seconds=5.0))
    nothing = fedsim.systems.Timeline(*(column[:0] for column in schedule.timeline))
    with pytest.raises(ValueError, match="no dispatch whose outcome is known"):
        plots.plot_timeline(dataclasses.replace(schedule, timeline=nothing))


def test_progress_is_shown_against_what_all_runs_have():
    plain = [{"round": 1, "bits_up": 8e6, "bits_down": 8e6}, {"round": 1, "test_accuracy": 0.5}]
    clock = [{"round": 1, "simulated_seconds": 2.0, "bytes_up": 1e6, "bytes_down": 3e6, "bits_up": 1}]
    clock += [{"round": 1, "test_accuracy": 0.7}]
    labels = ["server steps (rounds)", "simulated seconds", "megabytes sent so far"]
    figure = plots.plot_progress({"clock": clock})
    assert [axes.get_xlabel() for axes in figure.axes] == labels
    assert [axes.lines[0].get_xdata().tolist() for axes in figure.axes] == [[1], [2.0], [4.0]]
    figure = plots.plot_progress({"clock": clock, "plain": plain})
    assert [axes.get_xlabel() for axes in figure.axes] == [labels[0], labels[2]]
    assert [line.get_xdata().tolist() for line in figure.axes[1].lines] == [[4.0], [2.0]] and png(figure)
    with pytest.raises(ValueError, match="'plain' has no test_loss"):
        plots.plot_progress({"plain": plain}, "test_loss")
    with pytest.raises(ValueError, match="at least one run"):
        plots.plot_progress({})


def test_a_graph_shows_the_nodes_values_and_the_bytes_of_its_links():
    topology = fedsim.decentralized.Topology([nx.path_graph(4), nx.cycle_graph(4)])
    links = topology.bytes_by_link(10, rounds=3)  # two rounds on the path, one on the cycle
    figure = plots.plot_graph(topology.graphs[1], values=[0.1, 0.9, 0.5, 0.4], links=links)
    axes, bar = figure.axes
    edges, nodes = axes.collections
    widths = dict(zip(topology.graphs[1].edges, edges.get_linewidths(), strict=True))
    assert np.isclose((widths[0, 1] - 0.3) / (widths[0, 3] - 0.3), 3)
    assert nodes.get_array().tolist() == [0.1, 0.9, 0.5, 0.4] and bar.get_ylabel() == "accuracy"
    assert [text.get_text() for text in axes.texts] == list("0123") and png(figure)
    unordered = nx.Graph([(0, 2), (2, 1), (1, 3), (3, 0)])
    axes = plots.plot_graph(unordered, values=[0.0, 0.1, 0.2, 1.0]).axes[0]
    drawn = dict(zip(map(tuple, axes.collections[1].get_offsets().round(6)), axes.collections[1].get_array(), strict=True))
    for text in axes.texts:  # Each number is written on the node that has its value, and neighbours are next to each other.
        assert drawn[tuple(np.round(text.get_position(), 6))] == [0.0, 0.1, 0.2, 1.0][int(text.get_text())]
    places = {int(text.get_text()): np.array(text.get_position()) for text in axes.texts}
    assert all(np.isclose(np.linalg.norm(places[i] - places[j]), np.sqrt(2)) for i, j in unordered.edges)
    with pytest.raises(ValueError, match="give topology.graphs"):
        plots.plot_graph(topology)
    with pytest.raises(ValueError, match="Expected 4 values, one per node, got shape"):
        plots.plot_graph(topology.graphs[0], values=[0.1])
    with pytest.raises(ValueError, match="none of the edges"):
        plots.plot_graph(topology.graphs[0], links={(0, 3): 1.0})


def test_nodes_are_shown_over_rounds_and_bytes():
    history = [{"round": 1, "bits_up": 8e6, "consensus_distance": 2.0}, {"round": 2, "bits_up": 8e6, "consensus_distance": 0.5}]
    history += [{"round": 2, "test_personal_loss_clients_mean": 0.7, "test_personal_loss_clients_worst10": 0.9}]
    figure = plots.plot_nodes({"ring": history}, "loss")
    assert [axes.get_xlabel() for axes in figure.axes] == ["rounds", "rounds", "megabytes sent by all nodes so far"]
    assert [line.get_ydata().tolist() for axes in figure.axes for line in axes.lines] == [
        [0.7], [0.9], [2.0, 0.5], [0.7], [0.9]
    ]  # fmt: skip
    assert figure.axes[2].lines[0].get_xdata().tolist() == [2.0] and png(figure)
    with pytest.raises(ValueError, match="'ring' has no test_personal_accuracy_clients_mean"):
        plots.plot_nodes({"ring": history})
    with pytest.raises(ValueError, match="at least one run"):
        plots.plot_nodes({})


def progress(number):
    """The metrics of a run: two rounds and two evaluations."""
    lines = []
    for round in (1, 2):
        lines.append({"round": round, "simulated_seconds": 3.0 * round, "bits_up": 8e6, "bits_down": 8e6, "loss": 1 / round})
        score = {"test_accuracy": 0.4 * round, "test_accuracy_clients_worst10": 0.3 * round}
        nodes = {f"test_personal_accuracy_clients_{kind}": 0.4 * round for kind in ("mean", "worst10")}
        lines += [{"round": round, "consensus_distance": 0.5**round}, {"round": round} | score | nodes]
    return lines


@pytest.mark.first(8)
@pytest.mark.parametrize("plot", [plots.plot_progress, plots.plot_bits, plots.plot_nodes])
@pytest.mark.parametrize("runs", [2, 12, 40])
def test_every_run_has_its_own_style_and_the_legend_covers_no_curve(plot, runs):
    figure = plot({f"run {number} with a long name": progress(number) for number in range(runs)})
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == runs and figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    for axes in figure.axes:
        assert not box.overlaps(axes.get_window_extent()) and axes.get_legend() is None
    named = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker(), line._dash_pattern[1] and 1) for line in named}
    assert len(styles) == len(named) == runs


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_learning_curve_has_a_panel_for_each_scale_and_whole_rounds(evaluated, tmp_path, monkeypatch):
    figures = []
    new_figure = _report.new_figure
    monkeypatch.setattr(_report, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    lines = [line for line in progress(0) if evaluated or "loss" in line]
    fedsim.experiment.draw_learning_curve(lines, tmp_path / "curve.png", "a title")
    (figure,) = figures
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["test accuracy"] * evaluated + ["training loss\n(mean over the cohort)"]
    boxes = [axes.get_position() for axes in figure.axes]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))  # No two scales in one panel.
    ticks = figure.axes[-1].get_xticks()
    assert np.array_equal(ticks, np.round(ticks)) and (tmp_path / "curve.png").exists()


def test_axes_of_nodes_are_named_and_a_logarithmic_one_says_so():
    history = progress(0)
    figure = plots.plot_nodes({"ring": history})
    figure.canvas.draw()
    assert all(axes.get_ylabel() and axes.get_xlabel() for axes in figure.axes)
    distance = figure.axes[1]
    assert distance.get_yscale() == "log" and "logarithmic" in distance.get_ylabel()
    shown = [text.get_text() for text in distance.get_yticklabels(which="both") if text.get_text()]
    assert len(shown) >= 3 and all(re.fullmatch(r"[0-9.]+", text) for text in shown)


@pytest.mark.parametrize("rounds", [1, 4, 5, 7, 100])
def test_ticks_are_at_whole_rounds_however_few_and_a_single_round_is_seen(rounds, tmp_path, monkeypatch):
    figures = []
    new_figure = _report.new_figure
    monkeypatch.setattr(_report, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    lines = [{"round": round, "loss": 1.0} for round in range(1, rounds + 1)]
    lines += [{"round": rounds, "test_accuracy": 0.5, "test_accuracy_clients_worst10": 0.2}]
    fedsim.experiment.draw_learning_curve(lines, tmp_path / "curve.png", "a title")
    plots_of_one = [*figures, plots.plot_progress({"run": lines}), plots.plot_tuning([{"mu": 1.0}] * rounds, [2.0] * rounds)]
    for figure in plots_of_one:
        ticks = figure.axes[-1].get_xticks()
        assert np.array_equal(ticks, np.round(ticks))
    for line in (line for axes in figures[0].axes for line in axes.lines):
        assert len(line.get_xdata()) > 1 or line.get_marker() not in ("None", None)


def test_the_numbers_of_a_tuning_are_distinct_and_their_legend_covers_none():
    numbers = [{f"number_{i}": 0.1 * (i + 1) * 1.1**run for i in range(12)} for run in range(3)]
    figure = plots.plot_tuning(numbers, [3.0, 2.0, 2.5])
    figure.canvas.draw()
    left, right = figure.axes
    lines = [line for line in right.lines if not line.get_label().startswith("_")]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 12
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in (left, right))
    assert right.get_yscale() == "log" and right.get_ylabel() == "number (logarithmic)" and right.get_legend() is None


def test_a_graph_of_several_rings_is_drawn():
    rings = fedsim.decentralized.one_peer_exponential(8).graphs[1]  # of nodes that are two apart
    assert len(plots.plot_graph(rings).axes[0].texts) == 8
