"""What this host is: name, board, cores, memory."""

import os
import platform
import pwd
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostDescription:
    """What does not change while the agent runs."""

    hardware: str
    cpu_cores: int
    memory_bytes: int
    operating_system: str


def describe_host(root: Path = Path("/")) -> HostDescription:
    """Read the host's description; what cannot be read is left generic.

    Args:
        root: of the file system that is read; tests give a captured tree.
    """
    import psutil  # the command line asks this module for the cores, and starts without it

    return HostDescription(
        hardware=_hardware(root),
        cpu_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        operating_system=_operating_system(root),
    )


def usable_cores() -> int:
    """Cores that this process may use; 1 where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _hardware(root: Path) -> str:
    # Boards name themselves in the device tree, PCs and VMs in DMI.
    for name in ("proc/device-tree/model", "sys/class/dmi/id/product_name"):
        try:
            text = (root / name).read_bytes().decode(errors="replace")
        except OSError:
            continue
        text = text.replace("\0", "").strip()
        if text:
            return text
    return f"{platform.machine()} host"


def _operating_system(root: Path) -> str:
    try:
        text = (root / "etc/os-release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.platform(terse=True)
    for line in text.splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.platform(terse=True)


def user_name() -> str:
    """The effective user, by number when it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
