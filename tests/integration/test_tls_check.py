"""The doctor's handshake with controllers whose certificates are good, foreign, old or absent."""

import asyncio
import datetime
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edge_agent.config import ControllerSettings
from edge_agent.tls_check import check_certificate

pytestmark = pytest.mark.anyio

DAY = datetime.timedelta(days=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_certificate(folder: Path, first: int, last: int, name: str = "localhost") -> Path:
    """A certificate that signs itself, valid from and until so many days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + first * DAY)
        .not_valid_after(now + last * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


@asynccontextmanager
async def serving(certificate: Path | None) -> AsyncIterator[str]:
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    try:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("first", "last", "name", "level", "words", "fix"),
    [
        (-1, 400, "localhost", "ok", "trusted until", ""),
        (-1, 5, "localhost", "warning", "trusted until", "renew"),
        (-9, -2, "localhost", "error", "has expired", "renew"),
        (2, 9, "localhost", "error", "not valid yet", "set-ntp"),
        (-1, 400, "elsewhere", "error", "is not for 'localhost'", "server_name"),
    ],
)
async def test_certificate_is_judged_as_the_agent_would(
    tmp_path: Path, first: int, last: int, name: str, level: str, words: str, fix: str
) -> None:
    """A clock that is wrong."""
    path = make_certificate(tmp_path, first, last, name)
    async with serving(path) as address:
        found = await check_certificate(ControllerSettings(address, ca_file=str(path)), time.time())
    assert (found.level, words in found.text, fix in found.fix) == (level, True, True)


async def test_foreign_authority_and_plain_text_are_told_apart(tmp_path: Path) -> None:
    path = make_certificate(tmp_path, -1, 400)
    async with serving(path) as address:
        found = await check_certificate(ControllerSettings(address), time.time())
    assert found.level == "error"
    assert "ca_file" in found.fix
    other = tmp_path / "ca.pem"
    other.write_text("no certificate")
    found = await check_certificate(ControllerSettings(address, ca_file=str(other)), time.time())
    assert "no certificate in PEM" in found.text
