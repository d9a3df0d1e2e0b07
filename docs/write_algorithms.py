"""Writes docs/algorithms.md from the docstrings: ``python docs/write_algorithms.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import fedsim
from fedsim import aggregators, algorithms, attacks, compressors, decentralized, vertical

HEAD = """\
# Algorithms, aggregators, compressors, attacks

The algorithms for `fedsim.algorithms.get(NAME)` and `fedsim run --algorithm NAME`, and the aggregators, compressors and attacks
that can be combined with them. This page is written by `python docs/write_algorithms.py` from the docstrings; do not edit it.
To write your own algorithm, see [`examples/`](../examples) and [CONTRIBUTING.md](../CONTRIBUTING.md).

```python
algorithm = fedsim.algorithms.SCAFFOLD(
    model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    aggregator=Clipped(1.0, inner=Compressed(Eden(bits=2), inner=Mean())),  # how updates are sent and aggregated
    downlink=QSGD(levels=64),  # how the server's parameters are sent
)
```
"""

WITHOUT_SERVER = """\
These are in `fedsim.decentralized`. All take a `topology`, and most mixing `weights`, `message_loss` and `link_failures`. In
the formulas, x_i is the model of node i, g_i its gradient times the learning rate (or the sum over its local steps), and
W_ij the weight with which it takes the value of node j.

"""

VERTICAL = """\
These are in `fedsim.vertical`, for Python only; [the page on vertical learning](vertical.md) explains them. All take a
`VerticalModel`, an `optimizer` of the parties, a `compressor`, and `missing`, the probability that a party is missing in a
round.

"""


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    for family, members in algorithms.FAMILIES.items():
        sections.append(_section(family, {cls.__name__.lower(): cls for cls in members}, level="##"))
    sections.append(_section("Without a server", decentralized.ALGORITHMS, level="##", text=WITHOUT_SERVER))
    sections.append(_section("Columns at several parties", vertical.ALGORITHMS, level="##", text=VERTICAL))
    sections.append(_section("Aggregators", aggregators.AGGREGATORS, level="##"))
    sections.append(_section("Compressors", compressors.COMPRESSORS, level="##"))
    sections.append(_section("Attacks", attacks.ATTACKS, level="##"))
    return "\n".join(sections)


def _section(title: str, members: dict[str, type], level: str, text: str = "") -> str:
    cells = ((f"`{name}`", _first_sentence(cls), _own_fields(cls), _paper(cls)) for name, cls in members.items())
    rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return f"{level} {title}\n\n{text}| name | what it does | its own settings | paper |\n| --- | --- | --- | --- |\n{rows}"


def _first_sentence(cls: type) -> str:
    text = " ".join(inspect.getdoc(cls).split("\n\n")[0].split())
    return re.sub(r"``?([^`]+)``?", r"`\1`", text).replace("|", "&#124;")


def _own_fields(cls: type) -> str:
    """Returns the fields that not all classes of this kind have, or have with another default, with their defaults."""
    kinds = [decentralized.DecentralizedAlgorithm, vertical.VerticalAlgorithm, algorithms.FedAvg, algorithms.FedSGD]
    kinds = [kind for kind in [*kinds, fedsim.Algorithm, aggregators.Wrapper] if issubclass(cls, kind) and cls is not kind]
    general = {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}
    if issubclass(cls, algorithms.FedAvg | algorithms.FedSGD):
        general = {"model": dataclasses.MISSING, "server_optimizer": dataclasses.MISSING, "weighting": "examples"} | general
    own = [field for field in dataclasses.fields(cls) if field.init and general.get(field.name, field) != field.default]
    return ", ".join(f"`{field.name}{_default(field)}`" for field in own) or "–"


def _default(field: dataclasses.Field) -> str:
    simple = isinstance(field.default, float | int | str | bool | None)
    return f"={field.default!r}" if simple else ""


def _paper(cls: type) -> str:
    """Returns a link to the class's paper: the first link in its own docstring, or else in the docstring of its module."""
    for text in (inspect.cleandoc(cls.__doc__ or ""), sys.modules[cls.__module__].__doc__ or ""):
        link = re.search(r"https://(arxiv\.org/abs|doi\.org|ai\.googleblog\.com)/\S+?(?=[,;:.)]*(?:\s|$))", text)
        if link:
            label = link[0].split("/", 3)[-1].removeprefix("abs/") if "googleblog" not in link[1] else link[1]
            return f"[{label}]({link[0]})"
    return "–"


if __name__ == "__main__":
    Path(__file__).with_name("algorithms.md").write_text(page(), encoding="utf-8")
