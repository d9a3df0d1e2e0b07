"""Writes ``docs/reproductions.md`` and ``docs/reproductions/*.md`` from ``*.json``: ``python docs/write_reproductions.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim import reproductions

HERE = Path(__file__).parent
HEAD = """\
# Reproductions of published experiments

There is a page for each experiment, also for comparisons of this project that have no published number. It begins with a
verdict, and has the rows with a published number, the set-up, all rows, and the machine.
Numbers are *near* if they differ from the paper's by at most 10 %, and a statement, such as "SCAFFOLD is faster than FedAvg",
*holds* if it is true in most seeds.

![Results of papers and of fedsim, a point for each row: most lie near the diagonal, SCAFFOLD's far below](figures/papers.png)

"""
TAIL = """\

These pages are written by `fedsim reproduce NAME --data DIR --out docs/reproductions/NAME.json` and
`python docs/write_reproductions.py`. `fedsim reproduce` lists the experiments, `--only CASE` runs some cases of one, and
`--quick` is a short test. The settings, the values of every seed, the machine, the date, the commit and the versions of each
row are in `docs/reproductions/NAME.json`.
*paper* is the number that the experiment's paper states, and a dash where it states none. If the numbers have another source,
the column has its name, such as *theory*, or the cell says so: *replication*, *recalled*.
*ours* is the mean and the standard deviation over seeds; the error of a result with a single seed is unknown.
*time* is the time of all runs of a row on the machine below the table, which did other work at the same time, so it does not
measure speed. Results with fewer clients, rounds or seeds than the paper's are marked REDUCED; if the data or the
model is another one, *Set-up* says so. The names `unus_*` are those of experiments on
what UNUS implements, a framework for federated learning (K.-J. Hsu, master's thesis, National Tsing Hua University, 2021).
"""

# What the rows mean, in one sentence; tests/test_docs.py finds the numbers of rounds, points and seeds in the rows of its page.
VERDICTS = {
    "fedavg": (
        "The same order, other numbers: the perceptron reaches 97 % sooner than in the paper (in 36 rounds instead of 87), "
        "because the paper does not state its learning rate and a larger one is best here; the CNN's rounds are within "
        "a factor of two of those in the paper's Table 1."
    ),
    "fedprox": (
        "Mostly the same order: with 90 % stragglers, partial work is better than dropping them, and with 50 % it is not; a "
        "proximal term helps where clients differ, and on IID data it costs accuracy."
    ),
    "qffl": (
        "In part: on the hybrid data of the paper's code, q = 1 raises the accuracy of the worst tenth of devices "
        "from 19.3 ± 7.2 to 31.4 ± 2.5, as in the paper. On Synthetic(1,1), with which the paper's numbers do not agree, it "
        "does so in 1 of 5 seeds. On Vehicle, with 4 % of the data, q = 5 does so in 1 of 5 seeds, although it raises the "
        "training accuracy of the worst tenth in 4 of 5 seeds."
    ),
    "scaffold": (
        "The same order, other numbers: SCAFFOLD is faster than FedAvg, but all need far fewer rounds (27 instead of 258), "
        "because the images are another part of EMNIST and the learning rates are tuned for each entry."
    ),
    "niid_mnist": (
        "The same leader in one short run on a tenth of the images: SCAFFOLD is the most accurate, and does not fail as in "
        "one of two independent replications. The column *replication* has the numbers of the other, in which FedNova is last; "
        "here FedNova comes second, and FedAvg is last."
    ),
    "personalization": (
        "The same order, a smaller gain: fine-tuning raises the mean over writers from 82.8 ± 0.3 to 83.7 ± 0.2, and in "
        "FedJAX's notebook, which has another network and all writers, from 84.6 to 87.9. FedRep, for which the notebook has "
        "no number, reaches 63.0 ± 0.2 only: each of its heads is trained by one writer, who has few examples."
    ),
    "fedem_emnist": (
        "A part of the order, in one seed: FedEM reaches 72.3 where FedAvg reaches 70.9 (83.5 and 82.6 in the paper). Training "
        "alone is as good as FedAvg, 70.9 both, where the paper has 71.9 and 82.6: 25 clients with a perceptron gain nothing "
        "from each other. Learning rates are chosen from a grid of two, on the test images."
    ),
    "compression": (
        "The same order: at 1 bit, DRIVE and EDEN lose nothing, and uniform rounding loses most (50.1 ± 1.2 % instead of "
        "59.2 %, with another network and 300 of 3,400 writers)."
    ),
    "robustness": (
        "Mostly the same: sign flips times 4 break the mean (8.1 ± 1.6 %). The robust rules lose less than 5 points, but for "
        "the two that clip, which lose 5 to 6."
    ),
    "unus_fedavg": (
        "The same difference from the paper as in `fedavg`, because a virtual clock changes no round: 36 rounds instead of 87."
    ),
    "unus_peers": (
        "No published numbers: on two nodes, a round takes 4.7 s with `fedsim deploy` and 8.4 s with Flower's own strategy, "
        "which starts a process for each message. Messages have the same size. A node takes more memory (1,037 MB instead of "
        "628 MB), because its worker keeps JAX and the compiled program."
    ),
    "unus_dssgd": "The same order, other numbers: another network trains, and the paper's numbers are recalled.",
    "unus_staleness": (
        "The same order, a smaller gain: FedBuff needs fewest updates and least time, but its 407 updates instead of 531 in "
        "synchronous rounds (FEMNIST: 293 instead of 428) are not 3.3 times fewer."
    ),
    "unus_faults": "No published numbers: failing clients and lost messages cost time and hardly accuracy.",
    "random_quadratics": (
        "Matches within 40 % for all-reduce, RelaySGD, D² and gradient tracking; D-PSGD needs far more rounds or does not "
        "arrive, because its runs in the paper end by another rule, which was not read."
    ),
    "dropped_messages": (
        "Another order: methods that fail on CIFAR-10 in the paper do not fail on the digits, which are easier. RelaySGD falls "
        "from 93.4 ± 1.9 to 85.6 ± 12.3 % if 1 % of the messages are dropped; the paper's runs, which have momentum, lose "
        "nothing."
    ),
    "four_ways": "No published numbers: a comparison of this project, see [its own page](../four_ways.md).",
    "data_parallel": "No published numbers: a comparison of this project, see [its own page](../four_ways.md).",
    "diloco": (
        "No published numbers of this size: in one run of 500 steps, DiLoCo sends at most a tenth of the bytes of "
        "data-parallel AdamW with equal tokens, and its test loss is higher; that of streaming DiLoCo is nearest."
    ),
    "vertical": "Matches: the vertical algorithms reach the result of one organization with all columns.",
    "few_labels": "No published numbers: a comparison of this project, see [its own page](../few_labels.md).",
    "opacus_mnist": (
        "Matches: ε to all published digits, and all four accuracies, of one run each where Opacus has ten: 96.77 % where it "
        "has 96.78 ± 0.21, and 96.89 % where it has 97.09 ± 0.17, which is the largest difference in standard deviations."
    ),
    "dp_ftrl_femnist": (
        "A part of the published order: with ε = 4, a banded matrix (56.3 %) is above independent noise and the tree; the "
        "tree is as good as independent noise, because its noise in a sum of rounds is little smaller here."
    ),
    "tff_dp_digits": (
        "The published order, with 300 of 3,383 writers: the more noise, the lower the accuracy, and 120 writers with the most "
        "noise are as accurate as 50 without. Accuracies are within 9 % of the tutorial's, but four of six are above by more "
        "than two standard deviations, such as 0.814 ± 0.007 instead of 0.770; writers come back more often here. 120 writers "
        "are the fewest for ε ≤ 2, as in the tutorial, with all writers and by Rényi divergences; ε is far larger with 300."
    ),
    "secagg_cost": (
        "A client sends and receives the bytes of the closed form, less than 1 % off; the paper states two of its "
        "numbers, and the closed form gives both. The time of a client grows with the number of clients in SecAgg, and "
        "hardly in SecAgg+. That of the server grows with the clients that drop out and, without any, nearly with the cube of "
        "the clients in SecAgg, for the reconstruction of secrets from shares."
    ),
    "attacks_and_defenses": (
        "No published numbers: clipping alone stops no attack, and noise stops all of them, but also learning, because 50 "
        "clients are too few for it. A secure sum of 25 clients hides the property of one of them (AUC 0.47, without a defence "
        "0.99) and spoils the reconstruction of images, as more local steps do, but neither hides who took part."
    ),
    "nmse_and_bytes": (
        "Matches: every number within 1 %, and every bound holds; with one bit, DRIVE and EDEN have about a twelfth of the "
        "error of uniform rounding."
    ),
    "scaffold_quadratics": (
        "The same order: FedAvg is slower with more local steps and with more heterogeneity, and SCAFFOLD is not slower with "
        "more heterogeneity if it begins with c_i = g_i(x); if it begins with c_i = 0 and takes 10 local steps, it is: 60, 62 "
        "and 75 rounds. With 10 local steps and G = 1 it is 4.6 times faster than SGD (5 times in the paper); with 2 it is not."
    ),
    "flute_mnist": (
        "Below the published number: FLUTE's own model, with a sigmoid before the softmax, has 74.0 ± 5.3 % where FLUTE has "
        "about 81. Softmax regression has 78.4 ± 10.5 %. The standard deviations are large, because the accuracy after a round "
        "depends on its ten clients, which have two digits each."
    ),
    "flute_shakespeare": (
        "Not reached in a reduced run: 49.4 % after 150 of 1,200 rounds, where FLUTE has about 57 after all of them. It still "
        "grows when the run ends, by 2 points in the last 50 rounds."
    ),
    "afl_adult": (
        "Matches within the standard deviation: q-FFL has the paper's accuracy of the worse client, and AFL a little less. "
        "But the mean over both clients, q = 0, does no worse than q-FFL, so these data do not show what q-FFL gains."
    ),
    "transfer": "No published numbers: a comparison of this project, see [its own page](../few_labels.md).",
}
# Where the numbers come from that ours are compared with, if not from the paper: the name of their column.
SOURCES = {
    "vertical": "scikit-learn",
    "niid_mnist": "replication",
    "secagg_cost": "paper or closed form",
    "nmse_and_bytes": "theory",
}
PICTURES = {
    "compression": ("bytes", "Test accuracy against bits per parameter, for each compressor"),
    "nmse_and_bytes": ("nmse", "Normalized mean squared error against the bytes of a message, for each compressor"),
    "robustness": ("attacks", "Test accuracy of nine aggregators under four attacks"),
    "unus_staleness": ("simulated_time", "Simulated seconds to a target accuracy, for four synchronization models"),
    "unus_faults": ("simulated_time", "Test accuracy against simulated time with failing clients and lost messages"),
}
Rows = Sequence[Mapping[str, Any]]


def pages() -> dict[str, str]:
    """Returns all pages by their place in docs/."""
    found = {name: rows_of(name) for name in reproductions.REPRODUCTIONS}
    table = ["| experiment | verdict | near | hold |", "| --- | --- | --- | --- |"]
    for name, rows in found.items():
        near, numbers, hold, statements = counts(rows)
        verdict = verdict_of(name, rows).replace("](../", "](")
        cells = f"{near} of {numbers}" if numbers else "–", f"{hold} of {statements}" if statements else "–"
        table.append(f"| [{name}](reproductions/{name}.md) | {verdict} | {cells[0]} | {cells[1]} |")
    written = {f"reproductions/{name}.md": _page(name, rows) for name, rows in found.items()}
    return {"reproductions.md": HEAD + "\n".join(table) + "\n" + TAIL, **written}


def rows_of(name: str) -> Rows:
    """Returns the committed rows of an experiment."""
    return reproductions.read(HERE / "reproductions" / f"{name}.json", name)


def verdict_of(name: str, rows: Rows) -> str:
    """Returns the sentence about an experiment."""
    near, numbers, hold, statements = counts(rows)
    parts = [f"{near} of {numbers} published numbers are near"] * bool(numbers)
    parts += [f"{hold} of {statements} published statements hold"] * bool(statements)
    if not rows:
        return "Has not been run yet."
    return VERDICTS.get(name) or (", ".join(parts).capitalize() or "No published numbers") + "."


def counts(rows: Rows) -> tuple[int, int, int, int]:
    """Returns how many numbers are near the paper's, of how many, and how many statements hold, of how many."""
    near, numbers, hold, statements = 0, 0, 0, 0
    for row in rows:
        paper, ours = row["paper"] or "", row["ours"]
        if paper in ("yes", "no") and (seeds := re.match(r"in (\d+) of (\d+) seeds", ours)):
            statements += 1
            hold += (2 * int(seeds[1]) > int(seeds[2])) == (paper == "yes")
        elif (number := _number(paper)) and re.match(r"[\d.]|not reached", ours):
            numbers += 1
            near += abs(_number(ours) / number - 1) <= 0.1
    return near, numbers, hold, statements


def _number(text: str) -> float:
    """Returns the number with which a text begins, or 0."""
    found = re.match(r"(\d[\d,]*\.?\d*|\.\d+)(?![\d.]| times)", text)
    return float(found[1].replace(",", "")) if found else 0.0


def _page(name: str, rows: Rows) -> str:
    reproduction = reproductions.REPRODUCTIONS[name]
    near, numbers, hold, statements = counts(rows)
    lines = [f"# {name}", "", f"**{verdict_of(name, rows)}**", "", f"{reproduction.title}.", ""]
    source = SOURCES.get(name, "paper")
    if numbers or statements:
        whose = source if source == "scikit-learn" else f"the {source}"
        parts = [f"{near} of {numbers} numbers are near those of {whose}."] * bool(numbers)
        lines += [" ".join([*parts, *[f"{hold} of {statements} statements hold."] * bool(statements)]), ""]
    if rows:
        own = f"results_{name}", f"Results of {name}, a point for each row, beside that of the {source} where it has one"
        file, text = PICTURES.get(name, own)
        lines += [f"![{text}](../figures/{file}.png)", ""]
    published = [row for row in rows if row["paper"]]
    if 0 < len(published) < len(rows) and len(published) <= 24:
        heading = "## With a number to compare with" if name in SOURCES else "## With a published number"
        lines += [heading, "", reproductions.markdown_table(published, source), ""]
    lines += ["## Set-up", "", reproduction.paper, "", reproduction.notes, ""]
    missing = [case for case in reproduction.cases(reproductions.Request()) if case not in {row["id"] for row in rows}]
    if rows:
        machines = dict.fromkeys(f"{row['cpu']}, {row['cores']} cores, {row['device']}, {row['date'][:10]}" for row in rows)
        table = reproductions.markdown_table(rows, source)
        folded = [f"<details><summary>{len(rows)} rows</summary>", "", table, "", "</details>"] if len(rows) > 30 else [table]
        lines += ["## All results", "", *folded, "", f"Machine: {'; '.join(machines)}.", ""]
    if missing:
        names = " ".join(missing)
        lines += [f"Not yet run: `fedsim reproduce {name} --only {names}`. Takes {reproduction.duration}.", ""]
    # Notes link to pages from docs/, and this page is in a folder of it.
    return re.sub(r"\]\((?!https?:|#|\.\./)", "](../", "\n".join(lines))


if __name__ == "__main__":
    for place, text in pages().items():
        (HERE / place).write_text(text, encoding="utf-8")
