"""Certificates and keys: what a server and a client of TLS accept, and which nodes Flower's SuperLink refuses."""

from __future__ import annotations

import importlib.util
import socket
import ssl
import sys
import threading

import pytest
from deployment.test_flower import assert_refused

from fedsim.deployment import NodeError
from fedsim.deployment._certificates import Certificates, check_certificate

pytest.importorskip("cryptography")
FLOWER = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")
# A worker that answers every message by its number, without JAX.
_WORKER = """
import json, sys
from multiprocessing.connection import Listener
number, path = sys.argv[1:]
header = json.dumps({"arrays": [], "facts": {"node": int(number)}}).encode()
with Listener(path, "AF_UNIX") as listener:
    while True:
        with listener.accept() as connection:
            for _ in json.loads(connection.recv_bytes())["blobs"]:
                connection.recv_bytes()
            connection.send_bytes(json.dumps({"blobs": ["reply"]}).encode())
            connection.send_bytes(b"fedsim message 1\\n" + len(header).to_bytes(8, "little") + header)
"""


@pytest.fixture
def server(tmp_path):
    """A server with the certificate of its own authority; returns the certificates and the port."""
    made = Certificates(tmp_path / "own", nodes=1, hosts=["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    try:
                        context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield made, listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def test_a_certificate_is_accepted_for_its_authority_and_its_hosts_alone(server, tmp_path):
    made, port = server
    check_certificate(made.authority, "127.0.0.1", port)
    other = Certificates(tmp_path / "other", nodes=0)
    with pytest.raises(
        NodeError, match=r"The certificate of the server at 127\.0\.0\.1:\d+ does not fit the authority .*other"
    ):
        check_certificate(other.authority, "127.0.0.1", port)
    with pytest.raises(NodeError, match=r"at localhost:\d+ does not fit .* use a certificate .* for this name or address"):
        check_certificate(made.authority, "localhost", port)


def test_a_server_without_tls_is_named(tmp_path):
    made = Certificates(tmp_path, nodes=0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NodeError, match="does not speak TLS .* start it with a certificate, or leave out --secure"):
            check_certificate(made.authority, "127.0.0.1", listening.getsockname()[1])
        thread.join()


def test_private_keys_are_for_their_owner_and_differ(tmp_path):
    made = Certificates(tmp_path, nodes=2)
    private = [made.key, made.node_key(0), made.node_key(1)]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600] * 3
    assert len({path.read_bytes() for path in private}) == 3
    assert not list(tmp_path.glob("authority*.key"))


@FLOWER
@pytest.mark.slow
def test_nodes_without_a_registered_key_are_refused(tmp_path):
    """Two nodes with the keys of the run come; one without a key, and one with another key, do not."""
    from fedsim.deployment._flower import FlowerNodes
    from fedsim.deployment._processes import FlowerProcesses

    commands = [[sys.executable, "-c", _WORKER, str(number)] for number in range(2)]
    processes = FlowerProcesses(commands, secure=True)
    with FlowerNodes(processes) as nodes:
        assert sorted(nodes.introductions()) == [0, 1]
        authority = processes.folder / "certificates" / "authority.pem"
        other = Certificates(tmp_path, nodes=1).node_key(0)
        for number, key in enumerate([None, other]):
            assert_refused(processes.address, authority, processes.environment(), tmp_path / f"{number}.log", key)
        assert len(nodes.registered()) == 2
    assert not processes.folder.exists()
