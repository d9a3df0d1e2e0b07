"""The certificates of a server and the keys of nodes, made for one deployment."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from fedsim.deployment._nodes import NodeError

_VALID_DAYS = 30
_LOCAL = ("127.0.0.1", "localhost")


class Certificates:
    """A certificate authority, the server's certificate, and a pair of keys for each node, in files of a folder.

    The private key of the authority is written nowhere, so nobody can make further certificates. Only their owner can read the
    files of private keys. Flower's SuperLink and SuperNodes read these files.

    Args:
      folder: where the files are written.
      nodes: the number of nodes.
      hosts: names and IP addresses under which nodes reach the server. The certificate is valid for these alone, for 30 days.

    Attributes:
      authority: the file of the authority's certificate, by which nodes recognize the server.
      certificate: the file of the server's certificate.
      key: the file of the server's private key.

    Raises:
      ImportError: the package cryptography, which flwr brings, is not installed.

    >>> import tempfile
    >>> made = Certificates(Path(tempfile.mkdtemp()), nodes=2)
    >>> made.authority.name, made.node_key(1).name, made.public_node_key(1).read_text()[:19]
    ('authority.pem', 'node-1.key', 'ecdsa-sha2-nistp384')
    """

    def __init__(self, folder: Path, nodes: int, hosts: Sequence[str] = _LOCAL) -> None:
        try:
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ImportError(
                "Certificates need the package cryptography, which flwr brings: pip install 'fedsim-jax[run,flower]'."
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.authority, self.certificate, self.key = (folder / name for name in ("authority.pem", "server.pem", "server.key"))
        pem, bare = serialization.Encoding.PEM, serialization.NoEncryption()
        authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
        self.authority.write_bytes(_certificate("fedsim deployment", authority, None, authority, ()))
        self.certificate.write_bytes(_certificate("fedsim server", server, "fedsim deployment", authority, hosts))
        _write_private(self.key, server.private_bytes(pem, serialization.PrivateFormat.PKCS8, bare))
        for number in range(nodes):
            key = ec.generate_private_key(ec.SECP384R1())
            _write_private(self.node_key(number), key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, bare))
            public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            self.public_node_key(number).write_bytes(public)

    def node_key(self, number: int) -> Path:
        """Returns the file of a node's private key."""
        return self._folder / f"node-{number}.key"

    def public_node_key(self, number: int) -> Path:
        """Returns the file of a node's public key, which the server must know."""
        return self._folder / f"node-{number}.pub"


def check_certificate(authority: Path, host: str, port: int) -> None:
    """Connects to a server, and compares its certificate with that of an authority and with the server's address.

    Args:
      authority: the file of the authority's certificate.
      host, port: of the server.

    Raises:
      NodeError: the certificate does not fit, or the server does not speak TLS; the message says why, and what to do.
      OSError: the server does not answer.

    >>> check_certificate(Path("a.pem"), "127.0.0.1", 8000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedsim.deployment._nodes.NodeError: Expected a file with the certificate of an authority, got a.pem (No such file ...
    """
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise NodeError(
            f"Expected a file with the certificate of an authority, got {authority} ({error.strerror or error}): give that "
            "with which the server's certificate was made."
        ) from error
    with socket.create_connection((host, port), timeout=10) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLCertVerificationError as error:
            raise NodeError(
                f"The certificate of the server at {host}:{port} does not fit the authority {authority} "
                f"({error.verify_message.rstrip('.')}): use a certificate that this authority has made, for this name or "
                "address, and that has not expired."
            ) from error
        except ssl.SSLError as error:
            raise NodeError(
                f"The server at {host}:{port} does not speak TLS ({error.reason}): start it with a certificate, or leave "
                "out --secure."
            ) from error


def _certificate(name: str, key, issuer: str | None, authority, hosts: Sequence[str]) -> bytes:  # type: ignore[no-untyped-def]
    """Returns a certificate of a key, signed by an authority; without an issuer that of the authority itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now, own = datetime.datetime.now(datetime.UTC), issuer is None
    public, of_authority = key.public_key(), authority.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer or name))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # Clocks differ.
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=own, path_length=0 if own else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(of_authority), critical=False)
    )
    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    allowed = {"key_cert_sign", "crl_sign"} if own else {"digital_signature"}
    usage = {name: name in allowed for name in names.split()}
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
    if hosts:
        subjects = [x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host) for host in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
