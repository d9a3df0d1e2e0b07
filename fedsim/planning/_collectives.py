"""Collective operations in the text of a compiled program, and whether they lie in a loop."""

from __future__ import annotations

import re
from collections import Counter

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_OPERATION = re.compile(rf" ({'|'.join(_KINDS)})(?:-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LOOP = re.compile(r"\b(?:body|condition)=%?([\w.\-]+)")


def collectives_of(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Counts the collective operations of a compiled program, by kind.

    Args:
      text: the program's HLO, see ``jax.stages.Compiled.as_text``.

    Returns:
      Those outside of loops and those inside, where each is counted once, however often the loop repeats it.

    >>> collectives_of('''
    ... %step (a: f32[]) -> f32[] {
    ...   ROOT %b = f32[] all-reduce(%a), to_apply=%add
    ... }
    ... ENTRY %main (c: f32[]) -> f32[] {
    ...   %d = f32[] while(%c), condition=%more, body=%step
    ...   ROOT %e = f32[] all-gather(%d)
    ... }''')
    ({'all-gather': 1}, {'all-reduce': 1})
    """
    lines: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
        lines.setdefault(name, []).append(line)
    pending = _LOOP.findall(text)
    in_loops: set[str] = set()
    while pending:
        name = pending.pop()
        if name in lines and name not in in_loops:
            in_loops.add(name)
            pending += re.findall(r"%([\w.\-]+)", "\n".join(lines[name]))
    outside, inside = Counter[str](), Counter[str]()
    for name, own in lines.items():
        (inside if name in in_loops else outside).update(_OPERATION.findall("\n".join(own)))
    return dict(outside), dict(inside)
