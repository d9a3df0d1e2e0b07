"""Writes docs/algorithms.md from what the code says of itself: ``python docs/write_algorithms.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import fedsim
from fedsim import aggregators, algorithms, attacks, compressors

HEAD = """\
# Algorithms, aggregators, compressors, attacks

What `fedsim.algorithms.get(NAME)` and `fedsim run --algorithm NAME` know by name, and the values that combine with any of them.
Written by `python docs/write_algorithms.py` from the docstrings, so do not edit it. How to write one of your own:
[`examples/`](../examples), [CONTRIBUTING.md](../CONTRIBUTING.md).

```python
algorithm = fedsim.algorithms.SCAFFOLD(
    model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    aggregator=Clipped(1.0, inner=Compressed(Eden(bits=2), inner=Mean())),  # what clients send, how it is folded
    downlink=QSGD(levels=64),  # what the server sends
)
```
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for family, members in algorithms.FAMILIES.items():
        parts.append(_section(family, {cls.__name__.lower(): cls for cls in members}, level="##"))
    parts.append(_section("Aggregators", aggregators.AGGREGATORS, level="##"))
    parts.append(_section("Compressors", compressors.COMPRESSORS, level="##"))
    parts.append(_section("Attacks", attacks.ATTACKS, level="##"))
    return "\n".join(parts)


def _section(title: str, members: dict[str, type], level: str) -> str:
    cells = ((f"`{name}`", _first_sentence(cls), _own_fields(cls), _paper(cls)) for name, cls in members.items())
    rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    return f"{level} {title}\n\n| name | what it does | its own settings | paper |\n| --- | --- | --- | --- |\n{rows}"


def _first_sentence(cls: type) -> str:
    text = " ".join(inspect.getdoc(cls).split("\n\n")[0].split())
    return re.sub(r"``?([^`]+)``?", r"`\1`", text).replace("|", "&#124;")


def _own_fields(cls: type) -> str:
    """Fields beyond those that all of its kind have, with their defaults."""
    kinds = (algorithms.FedAvg, algorithms.GradientServer, fedsim.Algorithm, aggregators.Wrapper)
    general = {field.name for kind in kinds if issubclass(cls, kind) and cls is not kind for field in dataclasses.fields(kind)}
    own = [field for field in dataclasses.fields(cls) if field.init and field.name not in general]
    return ", ".join(f"`{field.name}{_default(field)}`" for field in own) or "–"


def _default(field: dataclasses.Field) -> str:
    simple = isinstance(field.default, float | int | str | bool | None)
    return f"={field.default!r}" if simple else ""


def _paper(cls: type) -> str:
    """Links of the module that defines it: the first of its docstring."""
    text = sys.modules[cls.__module__].__doc__ or ""
    found = re.search(r"https://(?:arxiv\.org/abs|doi\.org)/\S+?(?=[,;:.)]*(?:\s|$))", text)
    return f"[{found[0].split('/', 3)[-1].removeprefix('abs/')}]({found[0]})" if found else "–"


if __name__ == "__main__":
    Path(__file__).with_name("algorithms.md").write_text(page(), encoding="utf-8")
