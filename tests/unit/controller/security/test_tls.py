import datetime
import os
import ssl
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from controller.config import ServerSettings, SettingsError
from controller.security.tls import ServerCertificate, server_certificate


def settings(folder: Path, *names: str) -> ServerSettings:
    return ServerSettings(data_dir=folder, tls_names=names)


def made(folder: Path, *names: str) -> ServerCertificate:
    certificate = server_certificate(settings(folder, *names))
    assert certificate is not None
    return certificate


def handshake(server: ServerCertificate, ca_file: Path, name: str) -> dict[str, object]:
    """A TLS handshake in memory; returns the certificate that the client saw.

    Raises:
        ssl.SSLError: the client does not trust the server.
    """
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server.chain_file, server.key_file)
    client_context = ssl.create_default_context(cafile=ca_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    listening = server_context.wrap_bio(to_server, to_client, server_side=True)
    open_sides = [client, listening]
    for _ in range(20):
        for side in list(open_sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            open_sides.remove(side)
        if not open_sides:
            return dict(client.getpeercert() or {})
    raise AssertionError("the handshake never ended")


def test_without_tls_there_is_no_certificate(tmp_path: Path) -> None:
    assert server_certificate(replace(settings(tmp_path), insecure=True)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "router.example", "10.1.2.3"])
def test_client_with_the_authority_shakes_hands_under_every_name(tmp_path: Path, name: str) -> None:
    certificate = made(tmp_path, "router.example", "10.1.2.3")
    assert certificate.ca_file == tmp_path / "tls" / "ca.pem"
    assert handshake(certificate, certificate.ca_file, name)["subject"] == (
        (("commonName", "Pointsman controller"),),
    )


def test_client_refuses_another_name_and_another_authority(tmp_path: Path) -> None:
    certificate = made(tmp_path / "one")
    assert certificate.ca_file
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(certificate, certificate.ca_file, "elsewhere.example")
    other = made(tmp_path / "other")
    assert other.ca_file
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certificate, other.ca_file, "localhost")


def test_keys_are_for_the_controller_alone(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        certificate = made(tmp_path)
    finally:
        os.umask(old_mask)
    folder = tmp_path / "tls"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "server.pem": 0o644, "server.key": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert certificate.key_pem == (folder / "server.key").read_bytes()


def test_certificate_is_made_once_and_used_again(tmp_path: Path) -> None:
    assert made(tmp_path, "a.example") == made(tmp_path, "a.example")
    assert made(tmp_path) == made(tmp_path, "a.example")


def test_certificate_is_renewed_for_a_new_name_under_the_same_authority(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert first.ca_file
    authority = first.ca_file.read_bytes()
    second = made(tmp_path, "new.example")
    assert second.chain_pem != first.chain_pem
    assert first.ca_file.read_bytes() == authority
    handshake(second, first.ca_file, "new.example")


def test_certificate_is_renewed_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path)
    ends = x509.load_pem_x509_certificate(first.chain_pem).not_valid_after_utc

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
            moment = ends - datetime.timedelta(days=10)
            return cls.fromtimestamp(moment.timestamp(), tz)

    monkeypatch.setattr("controller.security.tls.datetime.datetime", Later)
    second = made(tmp_path)
    assert x509.load_pem_x509_certificate(second.chain_pem).not_valid_after_utc > ends


def test_board_whose_clock_is_a_little_behind_can_connect(tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate(made(tmp_path).chain_pem)
    behind = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=12)
    assert certificate.not_valid_before_utc < behind


@pytest.mark.parametrize("lost", ["ca.pem", "ca.key", "server.pem", "server.key"])
def test_lost_file_is_made_anew_and_everything_fits_together_again(
    tmp_path: Path, lost: str
) -> None:
    made(tmp_path)
    (tmp_path / "tls" / lost).unlink()
    again = made(tmp_path)
    assert again.ca_file
    handshake(again, again.ca_file, "localhost")


def test_key_of_an_interrupted_renewal_is_not_served_with_the_old_certificate(
    tmp_path: Path,
) -> None:
    """The key is written first; a power cut between the two leaves a pair that does not fit."""
    made(tmp_path / "other")
    made(tmp_path)
    (tmp_path / "tls" / "server.key").write_bytes(
        (tmp_path / "other" / "tls" / "server.key").read_bytes()
    )
    again = made(tmp_path)
    assert again.ca_file
    handshake(again, again.ca_file, "localhost")


@pytest.mark.parametrize("damaged", ["ca.pem", "ca.key"])
def test_damaged_authority_is_named_and_not_replaced_in_silence(
    tmp_path: Path, damaged: str
) -> None:
    """Agents trust the old one, so an operator decides."""
    made(tmp_path)
    (tmp_path / "tls" / damaged).write_text("not PEM")
    with pytest.raises(SettingsError, match=f"{damaged}.*remove"):
        made(tmp_path)


@pytest.mark.parametrize("damaged", ["server.pem", "server.key"])
def test_damaged_server_files_are_made_anew(tmp_path: Path, damaged: str) -> None:
    made(tmp_path)
    (tmp_path / "tls" / damaged).write_text("not PEM")
    again = made(tmp_path)
    assert again.ca_file
    handshake(again, again.ca_file, "localhost")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SettingsError, match="file"):
        made(tmp_path / "file")


# -- the operator's own ----------------------------------------------------------------------------


def own(chain: Path, key: Path) -> ServerSettings:
    return ServerSettings(tls_cert_file=str(chain), tls_key_file=str(key))


def test_files_of_the_operator_are_used_as_they_are(tmp_path: Path) -> None:
    given = made(tmp_path)
    certificate = server_certificate(own(given.chain_file, given.key_file))
    assert certificate is not None
    assert certificate.chain_pem == given.chain_pem
    assert certificate.ca_file is None


def test_file_of_the_operator_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"chain\.pem: cannot be read: No such file"):
        server_certificate(own(tmp_path / "chain.pem", tmp_path / "key.pem"))


def test_key_that_does_not_belong_to_its_certificate_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    with pytest.raises(SettingsError, match="do not belong together"):
        server_certificate(own(one.chain_file, other.key_file))
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not PEM")
    with pytest.raises(SettingsError, match="garbage"):
        server_certificate(own(garbage, one.key_file))
