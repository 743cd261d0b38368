"""A Debian 12 root file system that test hosts boot from, made once and cached."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SUITE: Final = "bookworm"
# What a small server has, and no more: no pip, no compiler, nothing of the agent's.
PACKAGES: Final = (
    "ca-certificates",
    "dbus",
    "iproute2",
    "libgomp1",
    "openssh-server",
    "python3",
    "python3-venv",
    "sudo",
    "systemd",
    "systemd-sysv",
)
OPERATOR: Final = "deploy"
# Run inside the new root. Host keys differ from host to host, and an unprivileged operator who
# may become root is how people reach a real machine.
FINISH_SCRIPT: Final = f"""
set -eu
rm -f /etc/ssh/ssh_host_*
useradd --create-home --shell /bin/bash {OPERATOR}
echo '{OPERATOR} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{OPERATOR}
chmod 0440 /etc/sudoers.d/{OPERATOR}
systemctl --quiet enable systemd-networkd.service ssh.service
systemctl --quiet mask systemd-networkd-wait-online.service
apt-get clean
rm -rf /var/lib/apt/lists/*
"""
BUILD_DEADLINE_SECONDS: Final = 900.0


class HostUnavailableError(RuntimeError):
    """A test host cannot be made; the text says why, with the end of the log."""


def cache_folder() -> Path:
    """Return the folder for what is dear to make: POINTSMAN_CACHE or ~/.cache/pointsman."""
    return Path(os.environ.get("POINTSMAN_CACHE") or Path.home() / ".cache" / "pointsman")


def debian_root() -> Path:
    """Return a finished root file system, which callers must not write to.

    The first call takes about a minute and needs Debian's packages; later ones find it in
    the cache. POINTSMAN_DEBIAN_MIRROR names another source of packages.

    Raises:
        HostUnavailableError: debootstrap failed or did not end in time.
    """
    recipe = "\n".join((SUITE, *PACKAGES, FINISH_SCRIPT))
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = cache_folder() / "debian12-root"
    root = folder / key
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not root.is_dir():
            for stale in folder.iterdir():
                if stale.is_dir():
                    shutil.rmtree(stale)
            building = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
            _bootstrap(building, folder / "debootstrap.log")
            building.chmod(0o755)
            building.rename(root)
    return root


def _bootstrap(root: Path, log_file: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    command += [SUITE, str(root)]
    if mirror := os.environ.get("POINTSMAN_DEBIAN_MIRROR"):
        command.append(mirror)
    # What debootstrap mounts and starts ends with these namespaces, however it ends itself.
    contained = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
    deadline = time.monotonic() + BUILD_DEADLINE_SECONDS
    try:
        with log_file.open("wb") as log:
            for step in (command, ["chroot", str(root), "/bin/sh", "-c", FINISH_SCRIPT]):
                subprocess.run(
                    [*contained, *step],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
                    check=True,
                    timeout=max(1.0, deadline - time.monotonic()),
                )
    except subprocess.SubprocessError as error:
        tail = log_file.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise HostUnavailableError(f"cannot make a Debian root: {error}\n{tail}") from error


@contextlib.contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    """Hold a lock between processes, so that two test runs do not build the same root."""
    deadline = time.monotonic() + BUILD_DEADLINE_SECONDS
    with lock_file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise HostUnavailableError(
                        f"another process holds {lock_file} for too long"
                    ) from error
                time.sleep(0.2)
        yield
