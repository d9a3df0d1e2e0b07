"""The error of compressed vectors and the bytes of their messages, beside the laws that the compressors' papers state.

NMSE is E ||Q(x) - x||² / ||x||², where Q(x) is what the receiver decodes. The laws are those of DRIVE (S. Vargaftik et al.,
NeurIPS 2021, https://arxiv.org/abs/2105.08339, theorems 2 and 3), EDEN (S. Vargaftik et al., ICML 2022,
https://arxiv.org/abs/2108.08842), QSGD (D. Alistarh et al., NeurIPS 2017, https://arxiv.org/abs/1610.02132), TernGrad (W. Wen
et al., NeurIPS 2017, https://arxiv.org/abs/1705.07878), uniform quantization with and without a rotation (A. T. Suresh et al.,
ICML 2017, https://arxiv.org/abs/1611.00429), random k (J. Konečný, P. Richtárik, 2018, https://arxiv.org/abs/1611.07555) and
top k (S. U. Stich et al., NeurIPS 2018, https://arxiv.org/abs/1809.07599).

Some laws are numbers: those of DRIVE and EDEN, for long vectors and a uniformly random rotation, are

- 1 - 2 / π (biased, the smallest error) and π / 2 - 1 (unbiased) for DRIVE, and
- D / (1 - D) for the unbiased EDEN, where D is the distortion of the best quantizer of a Gaussian with 2^b levels;

that of random k is d / k - 1, and those of TernGrad and uniform quantization are functions of the vector. Others are bounds.

A seed is a vector of d = 4,096 coordinates from LogNormal(0, 1), one block of DRIVE's transform, and a round is a message of
it with another key. Deviation: the rotation is a randomized Hadamard transform, as in the experiments of DRIVE and EDEN.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import rng
from fedsim.compressors import (
    QSGD,
    Compressor,
    Drive,
    Eden,
    RandomK,
    RotatedUniformQuantizer,
    TernGrad,
    TopK,
    UniformQuantizer,
)
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row

D = 4096
_EDEN = {1: 0.570796, 2: 0.133121, 3: 0.035784, 4: 0.009592, 5: 0.002511}


class _Entry(NamedTuple):
    """A compressor and its law, a number or a function of a vector ``float64 [d]``, which may be a bound."""

    title: str
    compressor: Compressor
    law: float | Callable[[np.ndarray], float]
    bound: bool = False


def terngrad_law(x: np.ndarray) -> float:
    """Returns ||x||_1 max|x| / ||x||² - 1.

    >>> terngrad_law(np.array([1.0, -1.0, 0.0]))
    0.0
    """
    return float(np.abs(x).sum() * np.abs(x).max() / (x @ x) - 1)


def uniform_law(x: np.ndarray, levels: int) -> float:
    """Returns the variance of rounding at random to one of two neighbouring levels, of all coordinates, over ||x||².

    >>> uniform_law(np.array([0.0, 0.5, 1.0]), 2)
    0.2
    """
    step = np.ptp(x) / (levels - 1)
    part = np.modf((x - x.min()) / step)[0]
    return float((part * (1 - part)).sum() * step**2 / (x @ x))


def _entries() -> dict[str, _Entry]:
    entries = {
        "drive-biased": _Entry("DRIVE, 1 bit, smallest error", Drive(unbiased=False), 0.36338),
        "drive": _Entry("DRIVE, 1 bit, unbiased", Drive(), 0.57080),
    }
    for bits, law in _EDEN.items():
        entries[f"eden-{bits}"] = _Entry(f"EDEN, {bits} bit{'s' * (bits > 1)}, unbiased", Eden(bits=bits), law)
    for percent in (1, 10):
        k = math.ceil(D * percent / 100)
        entries[f"random-{percent}"] = _Entry(f"random {percent} %", RandomK(fraction=percent / 100), D / k - 1)
        entries[f"top-{percent}"] = _Entry(f"top {percent} %", TopK(fraction=percent / 100), 1 - k / D, bound=True)
    entries["terngrad"] = _Entry("TernGrad, 2 bits", TernGrad(), terngrad_law)
    qsgd = min(D / 3**2, math.sqrt(D) / 3)
    entries["qsgd"] = _Entry("QSGD, 3 levels and a sign, 3 bits", QSGD(levels=3), qsgd, bound=True)
    for bits in (1, 2, 4):
        levels, plural = 2**bits, "s" * (bits > 1)
        of_vector = functools.partial(uniform_law, levels=levels)
        most = (2 * math.log(D) + 2) / (levels - 1) ** 2
        rotated = RotatedUniformQuantizer(levels=levels)
        entries[f"uniform-{bits}"] = _Entry(f"uniform, {bits} bit{plural}", UniformQuantizer(levels=levels), of_vector)
        entries[f"rotated-{bits}"] = _Entry(f"rotated uniform, {bits} bit{plural}", rotated, most, bound=True)
    return entries


def errors_and_bits(compressor: Compressor, x: np.ndarray, key: jax.Array, messages: int) -> tuple[np.ndarray, float]:
    """Returns the squared error over ||x||² of every message of ``x``, ``float64 [messages]``, and the bits of a message.

    >>> errors_and_bits(TopK(fraction=0.5), np.array([0.0, 3.0], np.float32), jax.random.key(0), 2)
    (array([0., 0.]), 33.0)
    """
    sent = jax.jit(jax.vmap(lambda key: compressor.transmit(x, key)))(jax.random.split(key, messages))
    exact = x.astype(np.float64)
    return np.square(np.asarray(sent.value, np.float64) - exact).sum(1) / (exact @ exact), float(sent.bits[0])


def _run(request: Request, entry: _Entry) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=1000, quick_rounds=20)
    began, found, laws, bits = time.perf_counter(), [], [], 0.0
    for seed in extent.seeds:
        x = np.random.default_rng(seed).lognormal(size=D).astype(np.float32)
        errors, bits = errors_and_bits(entry.compressor, x, rng.root(seed), extent.rounds)
        found.append(float(errors.mean()))
        laws.append(entry.law(x.astype(np.float64)) if callable(entry.law) else entry.law)
        request.log(f"{entry.title}: seed {seed}: NMSE {found[-1]:.4g}, law {laws[-1]:.4g}, {bits / 8:,.0f} bytes")
    settings = {"coordinates": D, "messages": extent.rounds, "vector": "LogNormal(0, 1)"}
    shared: dict[str, Any] = {"case": entry.title, "settings": settings, "reduced": extent.reduced()}
    yield Row.of_seeds(
        found,
        digits=max(0, 3 - math.floor(math.log10(np.mean(found)))),
        measure="NMSE",
        paper=f"{'at most ' if entry.bound else ''}{np.mean(laws):.5g}",
        seconds=time.perf_counter() - began,
        details={"bytes": bits / 8, "laws": laws},
        note=f"{bits / 8:,g} bytes",
        **shared,
    )
    if entry.bound:
        within = [error <= most for error, most in zip(found, laws, strict=True)]
        yield Row.counted(within, measure="NMSE within the bound", paper="yes", **shared)


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, entry) for name, entry in _entries().items()}


NMSE_AND_BYTES = Reproduction(
    name="nmse_and_bytes",
    title="Normalized mean squared error and bytes of a message, for eight compressors beside the laws of their papers",
    paper="S. Vargaftik et al. EDEN: communication-efficient and robust distributed mean estimation for federated learning. "
    "ICML 2022. https://arxiv.org/abs/2108.08842, and the papers of the other compressors: see "
    "[the compressors](algorithms.md#compressors).",
    duration="about 2 minutes",
    required_data="none",
    cases=_cases,
    notes="A seed is a vector of 4,096 coordinates from LogNormal(0, 1), which has 16,384 bytes, and a round is a message of "
    "it with another key. The remarks have the bytes of a message. Errors are compared with laws: those of DRIVE (π / 2 - 1, "
    "and 1 - 2 / π for the smallest error), EDEN and random k (d / k - 1) are numbers for every long vector, and those of "
    "TernGrad and of uniform quantization are means of the laws of the three vectors, which differ; *at most* is a bound.",
)
