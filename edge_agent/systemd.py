"""The agent's word to systemd (sd_notify); nothing happens outside it."""

import os
import socket
import time
from collections.abc import Callable, Mapping

import anyio
import structlog

log = structlog.get_logger()


def watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """How often systemd wants to hear of us; None when it does not watch this process."""
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    if microseconds <= 0 or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return microseconds / 1e6


async def feed_watchdog(is_healthy: Callable[[], bool]) -> None:
    """Tell systemd at half of its time-out that the agent is well, for as long as it is.

    It runs on the event loop, so that a loop that stands still is noticed as well.
    """
    seconds = watchdog_seconds(os.environ)
    while seconds is not None:
        if is_healthy():
            notify_systemd("WATCHDOG=1")
        await anyio.sleep(seconds / 2.0)


def notify_reloading() -> None:
    """Tell systemd that the settings are being read again; READY=1 ends it.

    The time tells it apart from the end of an earlier reload.
    """
    notify_systemd(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def notify_systemd(message: str) -> None:
    """Tell systemd how the service is doing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(message.encode())
        except OSError as error:
            log.warning("systemd.not_notified", error=error.strerror)
