"""The pages in docs/ equal the output of their scripts, and every link to the repository has the right address."""

import importlib
import json
import re
import runpy
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedsim
from benchmarks import readme, runs
from fedsim import aggregators, attacks, compressors, datasets, decentralized, vertical
from fedsim.reproductions import REPRODUCTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "datasets.md"

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
OTHER_REPOSITORIES = {"https://github.com/google/farmhash"}  # these are cited as sources


def repositories(text):
    """Returns the address of every Git repository that a text mentions.

    Recognized are pages of public hosts, Colab's and raw addresses of GitHub files, ``git clone`` and ``git+``.
    """
    text = re.sub(r"colab\.research\.google\.com/github/|raw\.githubusercontent\.com/", "github.com/", text)
    hosts = r"(?:git(?:hub|lab)\.com|codeberg\.org|bitbucket\.org)"
    named = re.findall(rf"\b({hosts})[/:]([\w.-]+/[\w.-]+)|git(?:\+| clone )https?://([\w.-]+)/([\w./-]+)", text)
    pairs = [(host or other_host, path or other_path) for host, path, other_host, other_path in named]
    return [f"https://{host}/{path.rstrip('.').removesuffix('.git')}" for host, path in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["datasets", "algorithms"])
def test_a_page_equals_the_output_of_its_script(name):
    """The script runs in its own process, because other tests register datasets."""
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path('docs/write_{name}.py')['page']())"
    command = [sys.executable, "-X", "utf8", "-c", code]
    written = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, encoding="utf-8")
    assert written.stdout == (DOCS / f"{name}.md").read_text(encoding="utf-8"), f"run: python docs/write_{name}.py"


def test_pages_say_how_to_install_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"].keys()
    installed = re.findall(r"pip install .*?fedsim-jax\[([\w,]+)\]", (DOCS / "install.md").read_text(encoding="utf-8"))
    assert {extra for names in installed for extra in names.split(",")} == extras - {"test"}
    assert "fedsim-jax[formats]" in PAGE.read_text(encoding="utf-8")


def test_page_of_algorithms_lists_all_registered_classes():
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    known = [
        *fedsim.algorithms.ALGORITHMS,
        *decentralized.ALGORITHMS,
        *vertical.ALGORITHMS,
        *aggregators.AGGREGATORS,
        *compressors.COMPRESSORS,
        *attacks.ATTACKS,
    ]
    assert [name for name in known if f"| `{name}` |" not in text] == []


# The paper of every entry in docs/algorithms.md, verified by hand.
PAPERS = {
    **dict.fromkeys(["fedsgd", "fedavg"], "1602.05629"),
    **dict.fromkeys(["fedadam", "fedyogi", "fedadagrad"], "2003.00295"),
    **dict.fromkeys(["fedprox", "adaptivefedprox"], "1812.06127"),
    **dict.fromkeys(["mime", "mimelite"], "2008.03606"),
    **dict.fromkeys(["qfedavg", "qfedsgd"], "1905.10497"),
    **dict.fromkeys(["fedmgda", "min_norm"], "2006.11489"),
    "secure_mean": "10.1145/3133956.3133982",
    **dict.fromkeys(["coordinate_median", "trimmed_mean"], "1803.01498"),
    **dict.fromkeys(["krum", "gaussian_noise"], "1703.02757"),
    **dict.fromkeys(["uniform_quantizer", "rotated_uniform_quantizer"], "1611.00429"),
    **dict.fromkeys(["mean", "partly_uniform", "sum", "identity", "cast"], "–"),
    "fedavgm": "1909.06335",
    "bucketing": "2006.09365",
    "model_replacement": "1807.00459",
    "fednova": "2007.07481",
    "scaffold": "1910.06378",
    "feddyn": "2111.04263",
    "fedexp": "2301.09604",
    "fedcm": "2106.10874",
    "feddc": "2203.11751",
    "fedsam": "2206.02618",
    "scaffnew": "2202.09357",
    "moon": "2103.16257",
    "diloco": "2311.08105",
    "streamingdiloco": "2501.18512",
    "agnosticfedavg": "2104.02748",
    "apfl": "2003.13461",
    "ditto": "2012.04221",
    "fedper": "1912.00818",
    "fedrep": "2102.07078",
    "lgfedavg": "2001.01523",
    "fedbabu": "2106.06042",
    "fedbn": "2102.07623",
    "fedala": "2212.01197",
    "fedproto": "2105.00243",
    "feddistill": "1811.11479",
    "heterofl": "2010.01264",
    "hypcluster": "2002.10619",
    "ifca": "2006.04088",
    "fedem": "2108.10445",
    "perfedavg": "2002.07948",
    "pfedme": "2006.08848",
    "reptile": "1803.02999",
    "fixmatch": "2001.07685",
    "fedmatch": "2006.12097",
    "feddf": "2006.07242",
    "pca": "1907.08059",
    "dpsgd": "1705.09056",
    "dfedavg": "2104.11375",
    "gradienttracking": "1607.03218",
    "d2": "1803.07068",
    "stochasticgradientpush": "1811.10792",
    "quasiglobalmomentum": "2102.04761",
    "decentralizeddiloco": "2311.08105",
    "chocosgd": "1902.00340",
    "relaysgd": "2110.04175",
    "adpsgd": "1710.06952",
    "dssgd": "10.1145/2810103.2813687",
    "splitfed": "2004.12088",
    "splitlearning": "1812.00564",
    "fedbcd": "1912.11187",
    "cvfl": "2206.08330",
    "kmeans": "10.1109/TIT.1982.1056489",
    "gaussianmixture": "10.1111/j.2517-6161.1977.tb01600.x",
    "histogram": "ai.googleblog.com",
    "quantiles": "10.1016/0304-3975(80)90061-4",
    "heavyhitters": "10.1016/j.jalgor.2003.12.001",
    "geometric_median": "1912.13445",
    "bulyan": "1802.07927",
    "divide_and_conquer": "10.14722/ndss.2021.24498",
    "fools_gold": "1808.04866",
    "flame": "2101.02281",
    "centred_clipping": "2012.10333",
    "integer_quantizer": "1712.05877",
    "qsgd": "1610.02132",
    "tern_grad": "1705.07878",
    "scaled_sign": "1901.09847",
    "drive": "2105.08339",
    "eden": "2108.08842",
    "top_k": "1809.07599",
    "random_k": "1611.07555",
    "magnitude_pruning": "1506.02626",
    "power_sgd": "1905.13727",
    "label_flip": "2007.08432",
    "pixel_backdoor": "1708.06733",
    "sign_flip": "1811.03761",
    "a_little_is_enough": "1902.06156",
    "inner_product": "1903.03936",
    "min_max": "10.14722/ndss.2021.24498",
    "min_sum": "10.14722/ndss.2021.24498",
}


def test_every_algorithm_cites_its_own_paper():
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| (?:\[([^\]]+)\]\(\S+\)|–) \|$", runpy.run_path(str(DOCS / "write_algorithms.py"))["page"](), re.M
    )
    assert {name: paper or "–" for name, paper in rows} == PAPERS
    classes = [cls for module in (fedsim.algorithms, decentralized, vertical) for cls in module.ALGORITHMS.values()]
    summaries = [cls.__doc__.split("\n\n")[0] for cls in classes]
    assert [text for text in summaries if "\n" in text.strip() or "``" in text] == []  # `fedsim algorithms` prints one line


# Base classes and wrappers, which cannot be chosen by name.
WITHOUT_NAME = {
    *("Clusters", "FlatFeatures", "Seeding", "Statistics"),
    *("DecentralizedAlgorithm", "VerticalAlgorithm"),
    *(
        "Aggregator",
        "SumAggregator",
        "Wrapper",
        "AuxMean",
        "Clipped",
        "Compressed",
        "FLTrust",
        "Grouped",
        "GaussianMechanism",
        "LocallyNoised",
        "MatrixMechanism",
        "DistributedMechanism",
        "StackAggregator",
    ),
    *("Compressor", "VectorCompressor", "ErrorFeedback", "Attack", "Collusion"),
}


@pytest.mark.parametrize(
    ("package", "base", "registry"),
    [
        (fedsim.algorithms, fedsim.Algorithm, fedsim.algorithms.ALGORITHMS),
        (decentralized, decentralized.DecentralizedAlgorithm, decentralized.ALGORITHMS),
        (vertical, vertical.VerticalAlgorithm, vertical.ALGORITHMS),
        (aggregators, aggregators.Aggregator, aggregators.AGGREGATORS),
        (compressors, compressors.Compressor, compressors.COMPRESSORS),
        (attacks, attacks.Attack, attacks.ATTACKS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_class_of_a_module_is_registered(package, base, registry):
    """Searches the files for classes, because tests and pages that use a registry cannot detect what is missing in it."""
    defined = set()
    for path in Path(package.__file__).parent.glob("_*.py"):
        if path.stem != "__init__":
            name = f"{package.__name__}.{path.stem}"
            values = vars(importlib.import_module(name)).values()
            defined |= {x for x in values if isinstance(x, type) and issubclass(x, base) and x.__module__ == name}
    public = {cls for cls in defined if not cls.__name__.startswith("_")}
    assert set(registry.values()) <= public
    assert {cls.__name__ for cls in public - set(registry.values())} - WITHOUT_NAME == set()


def test_algorithms_without_gradients_and_vertical_ones_are_at_most_two_classes_below_their_base():
    for cls in (*fedsim.algorithms.FAMILIES["Beyond gradients"], *vertical.ALGORITHMS.values()):
        assert sum(issubclass(x, fedsim.Algorithm | vertical.VerticalAlgorithm) for x in cls.__mro__) <= 1 + 2, cls


def test_pages_of_reproductions_equal_the_output_of_their_script():
    written = runpy.run_path(str(DOCS / "write_reproductions.py"))["pages"]()
    assert set(written) == {"reproductions.md", *(f"reproductions/{name}.md" for name in REPRODUCTIONS)}
    for place, text in written.items():
        assert text == (DOCS / place).read_text(encoding="utf-8"), f"{place}: run python docs/write_reproductions.py"
    assert [path.stem for path in (DOCS / "reproductions").glob("*.*") if path.stem not in REPRODUCTIONS] == []


def test_numbers_of_a_verdict_are_those_of_its_rows():
    script = runpy.run_path(str(DOCS / "write_reproductions.py"))
    assert set(script["VERDICTS"]) <= set(REPRODUCTIONS)
    found = 0
    for name, verdict in script["VERDICTS"].items():
        rows = script["rows_of"](name)
        cells = " ".join(f"{row['paper']} {row['ours']}" for row in rows)
        numbers = r"\d+\.\d+(?: ± \d+\.\d+)?|(?<=instead of )\d+|\d+(?= instead)|(?<=in )\d+(?= rounds)|\b\d+ of \d+ seeds"
        claimed = re.findall(numbers, verdict)
        found += len(claimed)
        assert [number for number in claimed if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", cells)] == [], name
    assert found >= 8


def test_a_row_is_near_or_holds():
    counts = runpy.run_path(str(DOCS / "write_reproductions.py"))["counts"]
    pairs = (
        ("87", "90 ± 1"),
        ("87", "36 ± 1"),
        (".658", "0.6585"),
        ("1,474", "not reached"),
        ("3.3 times fewer", "410"),
        ("–", "5"),
    )
    statements = ("yes", "in 2 of 3 seeds"), ("no", "in 2 of 3 seeds"), ("no", "in 0 of 3 seeds")
    assert counts([{"paper": paper, "ours": ours} for paper, ours in (*pairs, *statements)]) == (2, 4, 2, 3)


def test_pictures_of_results_show_the_present_results():
    from PIL import Image

    script = runpy.run_path(str(DOCS / "write_figures.py"))
    assert {path.stem for path in (DOCS / "figures").glob("*")} == set(script["FIGURES"])
    for name in script["FIGURES"]:
        with Image.open(DOCS / "figures" / f"{name}.png") as picture:
            drawn = picture.info["Description"]
        assert drawn == script["hash_of"](name), f"run: python docs/write_figures.py {name}"


def test_pictures_of_results_show_papers_numbers_and_bounds_and_no_panel_twice():
    results = runpy.run_path(str(DOCS / "write_figures.py"))["results"]
    panels = {
        name: results(DOCS / "reproductions" / f"{name}.json").axes for name in ("fedprox", "scaffold_quadratics", "afl_adult")
    }
    drawn = [(line.get_label(), line.get_marker()) for axes in panels["fedprox"] for line in axes.lines]
    assert ("paper", "D") in drawn
    bounds = [line.get_xdata()[0] for axes in panels["scaffold_quadratics"] for line in axes.lines if line.get_marker() == ">"]
    assert bounds == [5000] * 4
    first, second = ([line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"] for axes in panels["afl_adult"])
    assert len(first) == len(second) and first != second


@pytest.mark.parametrize(("name", "section", "count"), [("few_labels", "## Few labels", 12), ("transfer", "## Transfer", 8)])
def test_percentages_on_the_page_of_few_labels_are_those_of_the_rows(name, section, count):
    page = (DOCS / "few_labels.md").read_text(encoding="utf-8")
    text = page.split(section)[1].split("\n## ")[0].split("What to expect")[1]
    claimed = re.findall(r"\d+(?:\.\d)?(?= %| instead| and \d+ %)", re.sub(r"With \d+ %(?: of the labels)?", "", text))
    values = [float(row["ours"].split()[0]) for row in runpy.run_path(str(DOCS / "write_reproductions.py"))["rows_of"](name)]
    assert len(claimed) >= count
    for number in claimed:
        digits = len(number.partition(".")[2])
        assert any(abs(value - float(number)) <= 0.51 * 10**-digits for value in values), number


def test_names_on_the_page_of_choices_are_registered():
    named = set(re.findall(r"`([a-z][a-z_0-9]+)`", (DOCS / "choosing.md").read_text(encoding="utf-8")))
    modules = fedsim.algorithms, decentralized, vertical
    known = {name for module in modules for name in module.ALGORITHMS} | {*aggregators.AGGREGATORS, *compressors.COMPRESSORS}
    assert len(named) > 40 and named - known == set()


def test_numbers_of_tuning_are_those_of_the_notebook():
    claimed = re.findall(r"\d\.\d{3}", (DOCS / "tuning.md").read_text(encoding="utf-8"))
    notebook = (ROOT / "colab" / "differentiate.ipynb").read_text(encoding="utf-8")
    assert len(claimed) == 4 and [number for number in claimed if number not in notebook] == []


def test_tables_of_four_ways_are_those_of_its_script():
    written = runpy.run_path(str(DOCS / "write_four_ways.py"))["page"]()
    assert written == (DOCS / "four_ways.md").read_text(encoding="utf-8"), "run: python docs/write_four_ways.py"
    assert written.count("| **offloading** |") == 3 + 2 and "| asynchronous |" in written


def test_page_of_runs_is_that_of_the_committed_results():
    assert runs.page(runs.recorded()) == (DOCS / "runs.md").read_text(encoding="utf-8"), "run: python -m benchmarks.runs"


def sentences():
    """Yields parts of sentences with the numbers of the committed results, each with the page that has it."""
    rows_of = runpy.run_path(str(DOCS / "write_reproductions.py"))["rows_of"]
    ours = {
        (name, row["case"], row["measure"]): row["ours"]
        for name in ("unus_peers", "unus_fedavg")
        for row in rows_of(name)
        if row["ours"]
    }
    round_, sent = "seconds of a round, median", "bytes of a round"
    fedsim_, flower = (("unus_peers", case) for case in ("fedsim deploy", "FedAvg of Flower"))
    size = float(ours[*fedsim_, sent].replace(",", "")) / 2  # two nodes
    deployed = ours["unus_fedavg", "2NN, IID, E = 1, B = 10, on 4 nodes", "seconds of a deployed round, median"]
    yield "deployment", f"({size / 1000:.0f} kB in each direction), a round takes {ours[*fedsim_, round_]} s"
    yield "deployment", f"with Flower's own strategy {ours[*flower, round_]} s"
    yield "deployment", f"with four nodes and MNIST's 2NN, {deployed} s"

    rows = rows_of("four_ways")
    skewed, unequal = (
        next(row for row in rows if row["id"] == case and row["case"].endswith("collaborative") and row["details"])
        for case in ("skewed", "imbalance")
    )
    mean_of_models = [re.search(r"models has ([\d.]+)", row["note"])[1] for row in (skewed, unequal)]
    minutes = sum(row["seconds"] for row in rows if row["id"] == "imbalance") / 60
    yield "four_ways", f"({skewed['ours'].split()[0]} against {mean_of_models[0]} %)"
    yield "four_ways", f"the mean of all models has {mean_of_models[1]} %"
    yield "four_ways", f"All runs of this case took {minutes:.1f} minutes on two cores"

    rows = {(row["case"], row["measure"]): row for row in rows_of("data_parallel")}
    epoch, target = "simulated seconds per epoch of 128 gradients", "simulated seconds to 93%"
    mean = {key: statistics.mean(row["values"]) for key, row in rows.items() if key[1] in (epoch, target)}
    one, none = (mean[f"{slow} of 8 workers slow: synchronous", epoch] for slow in (1, 0))
    yield "four_ways", f"a single slow one makes an epoch {one / none:.1f} times as long"
    for slow, words in ((0, "without slow workers"), (4, "with four")):
        gossip, server = (mean[f"{slow} of 8 workers slow: {way}", target] for way in ("AD-PSGD", "asynchronous"))
        yield "four_ways", f"{gossip:.1f} s instead of {server:.1f} s {words}"

    compiled = json.loads((readme.RESULTS / "tpu-compile.json").read_text())["rows"]
    sizes = {row["model"]: row["parameters"] for row in compiled if "parameters" in row}
    large = f"{sizes['lm_350m'] / 1e6:.0f} million, {sizes['lm_1b'] / 1e9:.2f} billion and {sizes['lm_8b'] / 1e9:.2f} billion"
    yield "models", f"{large} parameters"
    lstm = [row for row in compiled if row["model"] == "stackoverflow_lstm"]
    memory = {row["topology"]: row["bytes_of_chip"] / 1e6 for row in lstm if row["table"] == "topologies"}
    yield "scale", f"{memory['v5e:4x8']:.0f} MB on 32 chips and {memory['v5e:8x8']:.0f} MB on 64"
    times = {row["clients"]: min(row["round_s"]) for row in lstm if row["cohort"] == 64 and "round_s" in row}
    yield "scale", f"With 64 clients they took {times[8]:.0f} s, and one device {times[1]:.0f} s (shortest of three rounds)"


def test_sentences_have_the_numbers_of_the_committed_results():
    texts = {page: " ".join((DOCS / f"{page}.md").read_text(encoding="utf-8").split()) for page, _ in sentences()}
    missing = [f"{page}: {words}" for page, words in sentences() if words not in texts[page]]
    assert len(texts) == 4 and missing == []


def test_page_of_datasets_has_a_section_for_each_and_links_to_it():
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"emnist62", "stackoverflow_word", "tfds:NAME"} <= set(sections) <= set(datasets.names())
    anchors = {re.sub(r"[^\w-]", "", section.lower()) for section in sections}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == anchors
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("http")]
    assert targets and [target for target in targets if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("words", ["1,500 | 10 | 20 | 1 | 50 | 0.03162 | 0.003162 | – | 0.0001 | 0.9 | 0.99", "max steps"])
def test_page_of_datasets_has_the_published_numbers(words):
    """The hyperparameters of FedAdam on EMNIST CR in Reddi et al.: 10^-1.5, 10^-2.5, 10^-4."""
    assert words in PAGE.read_text(encoding="utf-8")


def test_every_mention_of_the_repository_has_the_address_of_pyproject():
    """After a change of ``[project.urls]``, the failure lists every place that needs the change."""
    suffixes = {".md", ".py", ".ipynb", ".toml", ".cff", ".txt", ""}
    folders = [ROOT / name for name in (".ci", "benchmarks", "colab", "docs", "examples", "fedsim", "tests")]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    texts = [path for path in files if path.suffix in suffixes and path.is_file() and ".envs" not in path.parts]
    mentions = [
        (f"{path.relative_to(ROOT)}:{number}", address)
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for address in repositories(line)
    ]
    assert len(mentions) > 10
    wrong = [f"{place}: {address}" for place, address in mentions if address not in {REPOSITORY, *OTHER_REPOSITORIES}]
    assert not wrong, "\n".join([f"Expected {REPOSITORY}, the address in pyproject.toml, and found:", *wrong])


@pytest.mark.parametrize(
    "mention",
    [
        "see URL/ann/fed.sim.",
        "](URL/ann/fed.sim/blob/main/docs/runs.md)",
        '%pip install "fedsim-jax[run] @ git+URL/ann/fed.sim"',
        "git clone git@HOST:ann/fed.sim.git",
        "COLAB/ann/fed.sim/blob/main/colab/quickstart.ipynb",
        "RAW/ann/fed.sim/main/README.md",
    ],
)
def test_a_mention_of_a_repository_is_found(mention):
    host = "github.com"  # separate from the path, so that this file does not mention another repository
    text = mention.replace("URL", f"https://{host}").replace("HOST", host)
    text = text.replace("COLAB", "https://colab.research.google.com/github").replace("RAW", "https://raw.githubusercontent.com")
    assert repositories(text) == [f"https://{host}/ann/fed.sim"]


def test_a_repository_on_a_private_host_is_found_where_it_is_installed_or_cloned():
    address = "//git.example.org/group/fedsim"
    for command in ("pip install 'fedsim-jax @ git+https:", "git clone https:"):
        assert repositories(command + address) == ["https:" + address]
