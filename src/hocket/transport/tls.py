"""TLS between hosts, with a certificate that lives as long as the process that made it.

Nobody vouches for the certificate: both ends prove the job's secret over it (see ``proof``), so that whoever stands
between them with a certificate of his own is found out.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import tempfile
from pathlib import Path

from hocket.errors import JobError, UsageError
from hocket.transport.proof import NotProved

_HELLO = b"\x16"  # the first byte of a client
_ALERT = b"\x15\x03\x03\x00\x02\x02\x28"  # fatal: there is no handshake


def make_context() -> tuple[ssl.SSLContext, bytes]:
    """A server's context for TLS 1.3 with a new certificate, and what stands for the certificate in a proof."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise UsageError(
            "TLS between hosts needs the package 'cryptography': pip install cryptography, or --tls off in a network "
            "that you trust"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hocket")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # clocks of hosts may differ
        .not_valid_after(now + datetime.timedelta(days=365))
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    _load(context, pem)
    return context, _digest(certificate.public_bytes(serialization.Encoding.DER))


def wrap_server(connection: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The server's end of a connection with TLS, which replaces the plain one; see ``shake_hands``."""
    return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def shake_hands(connection: ssl.SSLSocket) -> None:
    """Make the server's handshake, within the connection's timeout; an end that speaks no TLS is told so."""
    plain = socket.socket
    if plain.recv(connection, 1, socket.MSG_PEEK) != _HELLO:
        plain.send(connection, _ALERT)
        plain.recv(connection, 128)  # what is not read would make the system reset the connection, and lose the alert
        raise JobError("a peer speaks no TLS")
    connection.do_handshake()


def wrap_client(connection: socket.socket) -> tuple[socket.socket, bytes]:
    """The worker's end of a connection with TLS, and what stands for the server's certificate in a proof.

    Raises:
        NotProved: the other end speaks no TLS.
        JobError: the connection broke, or nothing came in the connection's timeout.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proof that follows is over this certificate
    try:
        wrapped = context.wrap_socket(connection)
    except (ssl.SSLError, OSError) as error:
        connection.close()
        kind = NotProved if "WRONG_VERSION_NUMBER" in str(error) else JobError
        raise kind(f"TLS with a server failed ({error}): is --tls the same on all hosts?") from error
    certificate = wrapped.getpeercert(binary_form=True)
    assert certificate is not None
    return wrapped, _digest(certificate)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate; OpenSSL takes it from a file only, which has no name where that is possible."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hocket-certificate", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, pem)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.pem"
        path.touch(0o600)
        path.write_bytes(pem)
        context.load_cert_chain(path)


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()
