"""Whether the controller's certificate would be trusted, and for how long yet."""

import asyncio
import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_agent.config import ControllerSettings

_CONNECT_SECONDS: Final = 5.0
_SOON_DAYS: Final = 14.0


@dataclass(frozen=True, slots=True)
class TlsAnswer:
    """What came of it: `level` is "ok", "warning" or "error"; `fix` is for the last two."""

    level: str
    text: str
    fix: str = ""


async def check_certificate(controller: ControllerSettings, now: float) -> TlsAnswer:
    """Shake hands with the controller as the agent would.

    Args:
        controller: with an address, and without `insecure`.
        now: wall-clock seconds.

    Raises:
        OSError, asyncio.TimeoutError: nobody answers there.
    """
    address = controller.address
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(
            cafile=str(Path(controller.ca_file).expanduser()) if controller.ca_file else None
        )
    except (ssl.SSLError, OSError) as error:
        return TlsAnswer(
            "error",
            f"{controller.ca_file} is no certificate in PEM: {error}",
            "copy ca.pem from the controller's data directory (tls/ca.pem) again",
        )
    context.set_alpn_protocols(["h2"])
    name = controller.server_name or host
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port), ssl=context, server_hostname=name),
            _CONNECT_SECONDS,
        )
    except ssl.SSLCertVerificationError as error:
        return TlsAnswer("error", *_why_not(error, controller, name))
    except ssl.SSLError as error:
        return TlsAnswer(
            "error",
            f"{address} answers, but not with TLS ({error.reason or error})",
            "is it the controller's gRPC port? One that runs with --insecure needs it here too",
        )
    certificate = writer.get_extra_info("peercert") or {}
    writer.close()
    expires = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    day = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc).strftime("%Y-%m-%d")
    text = f"{address} answers, and its certificate is trusted until {day}"
    if expires - now < _SOON_DAYS * 86_400:
        return TlsAnswer("warning", text, "renew the controller's certificate before that day")
    return TlsAnswer("ok", text)


def _why_not(
    error: ssl.SSLCertVerificationError, controller: ControllerSettings, name: str
) -> tuple[str, str]:
    """The sentence and the fix for a certificate that was refused, by OpenSSL's code."""
    where = controller.address
    if error.verify_code == 9:  # X509_V_ERR_CERT_NOT_YET_VALID
        return (
            f"the certificate of {where} is not valid yet by this host's clock",
            "timedatectl set-ntp true, and wait for the time to be set",
        )
    if error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
        return (
            f"the certificate of {where} has expired",
            "renew it on the controller, or set this host's clock",
        )
    if error.verify_code in (62, 64):  # hostname or address mismatch
        return (
            f"the certificate of {where} is not for {name!r}",
            "set [controller] server_name to a name that is in the certificate, or dial that name",
        )
    return (
        f"the certificate of {where} is not from an authority this host trusts"
        f" ({error.verify_message})",
        "copy ca.pem from the controller's data directory (tls/ca.pem), and name it in"
        " [controller] ca_file",
    )
