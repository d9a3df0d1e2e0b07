"""What secure aggregation costs: bytes of a client beside the papers' closed form, and times of clients and server.

K. Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", CCS 2017, section 7, states the bits
that a client sends and receives for n clients and m parameters as 2 n a_K + (5 n - 4) a_S + m ⌈log2 R⌉. Here a_K and a_S are
the bits of a key and of a share, and R is above the largest sum. Its abstract states the factor by which this exceeds m values
of 16 bits. J. Bell et al., "Secure single-server aggregation with (poly)logarithmic overhead", CCS 2020, lets a client have
keys and shares with k others only, where k grows with the logarithm of n. The messages are the same, so the bits are those of
k + 1 clients of the first paper, apart from log2 R.

A client of either paper adds a mask for each other client with which it has keys, and one of its own. The server removes one
mask for each vector that has arrived and, for each client that dropped out after it gave away its shares, one for each of its
neighbours whose vector has arrived. So the time of the server grows with the drop-outs.

Without drop-outs, it reconstructs a secret of every client by Lagrange's interpolation at 0. The factors depend on whose shares
are used, which are those of more than half of the clients in SecAgg. No client holds a share of its own secret, so there are
about n / 2 sets of holders, each with n² / 4 multiplications of 256 bits. They take most of the server's time in a profile with
200 clients, so the time grows nearly with the cube of n. In SecAgg+, there are n sets of k / 3 holders.

Deviations: times are those of `fedsim.privacy.SecureAggregation`, whose generator of masks is not cryptographic and whose
integers are Python's, so the papers' times are not compared. A client keeps no share of its own secrets, so it sends one share
less, and it receives a bit for each share that the server asks for. The papers choose k from bounds on the probability that the
protocol fails or reveals something; here it is the next even number above 4 log2 n, and a third of the neighbours must answer.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.privacy import SecureAggregation
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row

VALUE_BITS, KEY_BITS, SHARE_BITS = 16, 256, 256
LOST = (0.0, 0.1, 0.3)  # the shares of clients that drop out before they send their vectors, in the rounds of a case
CASES = {f"clients-{n}": (n, 100_000) for n in (10, 50, 100, 200, 500)} | {
    f"parameters-{size}": (100, size) for size in (1_000, 10_000, 1_000_000)
}
PUBLISHED = {(2**10, 2**20): 1.73, (2**14, 2**24): 1.98}


def client_bytes(clients: int, parameters: int, neighbors: int | None = None) -> float:
    """Returns the bytes that a client sends and receives, by the closed form.

    >>> [round(client_bytes(n, m) / (m * 2), 2) for n, m in PUBLISHED]
    [1.73, 1.98]
    """
    n = clients if neighbors is None else neighbors + 1
    return (2 * n * KEY_BITS + (5 * n - 4) * SHARE_BITS + parameters * sum_bits(clients)) / 8


def sum_bits(clients: int) -> int:
    """Returns the bits of a sum of values of 16 bits."""
    return math.ceil(math.log2(clients * (2**VALUE_BITS - 1) + 1))


def protocols(clients: int) -> dict[str, SecureAggregation]:
    """Returns the protocols by name; SecAgg+ only where its clients have fewer neighbours than all others."""
    bits, neighbors = sum_bits(clients), 2 * math.ceil(2 * math.log2(clients))
    found = {"SecAgg": SecureAggregation(threshold=clients // 2 + 1, modulus_bits=bits)}
    if neighbors < clients - 1:
        found["SecAgg+"] = SecureAggregation(threshold=-(-neighbors // 3), neighbors=neighbors, modulus_bits=bits)
    return found


def _cases(request: Request) -> Mapping[str, Case]:
    return {"published": _published} | {name: functools.partial(_run, request, *case) for name, case in CASES.items()}


def _published() -> Iterator[Row]:
    for (clients, parameters), factor in PUBLISHED.items():
        yield Row(
            case=f"{clients:,} clients, {parameters:,} parameters, SecAgg",
            measure="bytes of a client, as a multiple of those of 16-bit values",
            paper=f"{factor}",
            ours=f"{client_bytes(clients, parameters) / (parameters * VALUE_BITS / 8):.2f}",
            seeds=1,
            note="by the closed form, with keys and shares of 256 bits; too many clients to be simulated here",
        )


def _run(request: Request, clients: int, parameters: int) -> Iterator[Row]:
    extent = request.extent(seeds=1, rounds=len(LOST))
    lost = LOST[: extent.rounds]
    draw = np.random.default_rng(0)
    vectors = draw.integers(2**VALUE_BITS, size=(clients, parameters), dtype=np.uint32)
    for name, protocol in protocols(clients).items():
        start, results = time.perf_counter(), []
        for seed, share in enumerate(lost):
            result = protocol.run(vectors, seed, dropped={"vector": range(round(share * clients))})
            expected = vectors[result.counted].sum(axis=0, dtype=np.uint32) & np.uint32(2**protocol.modulus_bits - 1)
            if not np.array_equal(result.sum, expected):
                raise AssertionError(f"The sum of {name} differs from that of the vectors with seed {seed}.")
            results.append(result)
        seconds = time.perf_counter() - start
        sent = float(np.mean(results[0].bytes_up + results[0].bytes_down))
        of_client = float(np.mean([result.client_seconds[result.counted].mean() for result in results]))
        of_server = [result.server_seconds for result in results]
        request.log(f"{name}, {clients} clients, {parameters:,} parameters: {seconds:.1f} s")
        common: dict[str, Any] = {
            "case": f"{clients} clients, {parameters:,} parameters, {name}",
            "seeds": len(extent.seeds),
            "settings": {"threshold": protocol.threshold, "neighbors": protocol.neighbors, "bits": protocol.modulus_bits},
            "reduced": extent.reduced(),
        }
        closed = client_bytes(clients, parameters, protocol.neighbors)
        of_neighbors = "" if protocol.neighbors is None else f"{protocol.neighbors} neighbours"
        yield Row(
            measure="bytes of a client",
            paper=f"{closed:,.0f}",
            ours=f"{sent:,.0f}",
            seconds=seconds,
            note=of_neighbors,
            **common,
        )
        yield Row(measure="seconds of a client", ours=f"{of_client:.3g}", details={"seconds": of_client}, **common)
        yield Row(
            measure=f"seconds of the server with {', '.join(f'{share:.0%}' for share in lost)} lost",
            ours=", ".join(f"{each:.3g}" for each in of_server),
            details={"seconds": of_server},
            **common,
        )


SECAGG_COST = Reproduction(
    name="secagg_cost",
    title="Secure aggregation: bytes of a client beside the closed form, and times of clients and server, against clients, "
    "parameters and drop-outs",
    paper="K. Bonawitz et al. Practical secure aggregation for privacy-preserving machine learning. CCS, 2017. "
    "https://doi.org/10.1145/3133956.3133982 (section 7). J. Bell et al. Secure single-server aggregation with "
    "(poly)logarithmic overhead. CCS, 2020. https://doi.org/10.1145/3372297.3417885",
    duration="500 clients: 11 min for one round; 1,000,000 parameters: 7 min; 200 clients: 6 min; every other case: at most 2 "
    "min, all on two cores that did other work, too",
    required_data="none; vectors are drawn",
    cases=_cases,
    notes="In the first two rows, *ours* is the closed form, beside a factor that the abstract of the first paper states. In "
    "all others, *ours* is measured, beside the closed form of the bytes that a client sends and receives, with "
    "keys and shares of 32 bytes: of the first paper for SecAgg, where a client has keys and shares with all others, and the "
    "same for k + 1 clients for SecAgg+, where it has them with k neighbours. Values have 16 bits, and their sums as many as "
    "it needs. A round of each case has no drop-outs; in two more, 10 % and 30 % of the clients drop out before they send "
    "their vectors. The sum is then compared with that of the vectors that arrived. Times are of the processor, in a "
    "simulation in Python and NumPy without cryptographic strength: how they grow can be compared with the papers, and their "
    "size cannot. Without drop-outs, the server's time is mostly that of Lagrange's factors, with which it reconstructs the "
    "clients' secrets from shares, and grows nearly with the cube of the clients in SecAgg. The column *time* is that of "
    "whole cases, on a machine that ran other programs, too. In SecAgg, more than half of the clients must answer, and in "
    "SecAgg+ a third of the neighbours.",
)
