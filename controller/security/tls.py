"""The controller's certificate: the operator's own, or one made here at the first start."""

import datetime
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from controller.config import ServerSettings, SettingsError

_VALID_DAYS: Final = 825
_RENEW_BEFORE: Final = datetime.timedelta(days=30)
_CLOCK_SKEW: Final = datetime.timedelta(days=1)
"""Devices without a clock battery may be behind."""


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """PEM of the chain and the key; `ca_file` is what agents and clients trust, if made here."""

    chain_pem: bytes
    key_pem: bytes
    chain_file: Path
    key_file: Path
    ca_file: Path | None


def server_certificate(settings: ServerSettings) -> ServerCertificate | None:
    """The certificate to serve with; None when TLS is off.

    Without files of the operator's, a private authority and a server certificate are made under
    `data_dir/tls`; agents are given `ca.pem` from there.

    Raises:
        SettingsError: the files cannot be read or written, or do not belong together.
    """
    if settings.insecure:
        return None
    if settings.tls_cert_file:
        chain_file = Path(settings.tls_cert_file).expanduser()
        key_file = Path(settings.tls_key_file).expanduser()
        ca_file = None
    else:
        folder = settings.data_dir / "tls"
        names = (*_own_names(), *settings.tls_names)
        try:
            chain_file, key_file, ca_file = _ensure_own(folder, names)
        except OSError as error:
            why = f"{error.filename}: cannot be used: {error.strerror}; see server.data_dir"
            raise SettingsError(why) from error
    try:
        certificate = ServerCertificate(
            chain_file.read_bytes(), key_file.read_bytes(), chain_file, key_file, ca_file
        )
    except OSError as error:
        raise SettingsError(f"{error.filename}: cannot be read: {error.strerror}") from error
    try:
        # Without a password given OpenSSL would ask for one on the terminal, and wait.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{chain_file} and {key_file} do not belong together, or are no PEM of a certificate "
            f"chain and of its key without a passphrase: {error}"
        ) from error
    return certificate


def _own_names() -> tuple[str, ...]:
    host = socket.gethostname()
    return ("localhost", "127.0.0.1", "::1", host, socket.getfqdn(host))


def _ensure_own(folder: Path, names: Sequence[str]) -> tuple[Path, Path, Path]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_file, ca_key_file = folder / "ca.pem", folder / "ca.key"
    chain_file, key_file = folder / "server.pem", folder / "server.key"
    if not (ca_file.exists() and ca_key_file.exists()):
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _sign(_name("Pointsman private authority"), ca_key, ca_key, None, ())
        _write(ca_key_file, _key_pem(ca_key), 0o600)
        _write(ca_file, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    ca, loaded = _authority(ca_file, ca_key_file)
    if not _is_current(chain_file, key_file, names, ca):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(_name("Pointsman controller"), key, loaded, ca, names)
        _write(key_file, _key_pem(key), 0o600)
        _write(chain_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return chain_file, key_file, ca_file


def _authority(
    ca_file: Path, ca_key_file: Path
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority made before; never replaced in silence, since agents trust it."""
    advice = f"remove {ca_file} to have a new one made, and give it to the agents"
    try:
        ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
        key = serialization.load_pem_private_key(ca_key_file.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{ca_file} or {ca_key_file} is damaged; {advice}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise SettingsError(f"{ca_file} and {ca_key_file} do not belong together; {advice}")
    return ca, key


def _is_current(
    chain_file: Path, key_file: Path, names: Sequence[str], ca: x509.Certificate
) -> bool:
    """Whether certificate and key are there, fit each other, the authority and the names."""
    try:
        certificate = x509.load_pem_x509_certificate(chain_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        certificate.verify_directly_issued_by(ca)
    except (FileNotFoundError, ValueError, TypeError, InvalidSignature):
        return False
    now = datetime.datetime.now(datetime.timezone.utc)
    if certificate.not_valid_after_utc - _RENEW_BEFORE < now:
        return False
    if certificate.public_key() != key.public_key():
        return False
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(_alternative_names(names)) <= set(known)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative_names(names: Sequence[str]) -> list[x509.GeneralName]:
    found: dict[x509.GeneralName, None] = {}
    for name in names:
        try:
            found[x509.IPAddress(ipaddress.ip_address(name))] = None
        except ValueError:
            if name:
                found[x509.DNSName(name)] = None
    return list(found)


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    names: Sequence[str],
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    is_authority = ca is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS * (4 if is_authority else 1)))
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                encipher_only=False,
                decipher_only=False,
            ),
            True,
        )
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName(_alternative_names(names)), False
        ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    return builder.sign(ca_key, hashes.SHA256())


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file that is never there in part, nor readable by others for a moment."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
