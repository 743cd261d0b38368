"""Debian hosts with systemd and ssh, booted in containers of this machine.

A host is a systemd-nspawn container on an overlay of a cached root. It lives inside a process
and a mount namespace of its own, whose first process dies with ours: when a test fails, is
interrupted or is killed, the kernel ends the host's processes, and its mounts and its network
interface go with them.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from tests.e2e.hosts.debian_root import OPERATOR, HostUnavailableError, cache_folder, debian_root

TOOLS: Final = {
    "debootstrap": "debootstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
MAX_HOSTS: Final = 16
BOOT_DEADLINE_SECONDS: Final = 60.0
POWER_OFF_DEADLINE_SECONDS: Final = 120.0
KILL_DEADLINE_SECONDS: Final = 10.0
COMMAND_DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1
REAP_SECONDS: Final = 10.0
# The hierarchies in which systemd keeps its own groups where it does not run this machine.
CGROUP_ROOTS: Final = (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))

BOOT_SCRIPT: Final = """
set -eu
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged"
shift 2
exec systemd-nspawn "$@"
"""


def why_no_hosts() -> str | None:
    """Return why hosts cannot be booted here, with the remedy; None when they can."""
    if os.geteuid() != 0:
        return "booting a host needs root"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"booting a host needs: apt-get install {' '.join(missing)}"
    return None


@dataclass
class DebianHost:
    """A running host, reached by ssh as an unprivileged user with sudo.

    Attributes:
        name: name of the machine.
        address: its IPv4 address.
        control_address: the IPv4 address by which it reaches this machine.
        user: login name; sudo asks it for no password.
        key_file: private key of that user.
        known_hosts_file: the host's public key, for strict checking.
        console_file: what systemd printed while booting.
    """

    name: str
    address: str
    control_address: str
    user: str
    key_file: Path
    known_hosts_file: Path
    console_file: Path
    _root: Path
    _folder: Path
    _init: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def interface(self) -> str:
        """Name of this machine's end of the cable to the host."""
        return f"ve-{self.name}"

    @property
    def ssh_options(self) -> list[str]:
        """Options of ssh that reach this host only if it is the one that was booted."""
        return [
            "-oBatchMode=yes",
            "-oConnectTimeout=5",
            "-oIdentitiesOnly=yes",
            "-oServerAliveInterval=5",
            "-oStrictHostKeyChecking=yes",
            f"-oUserKnownHostsFile={self.known_hosts_file}",
            f"-oIdentityFile={self.key_file}",
        ]

    def run(
        self, command: str, timeout_seconds: float = COMMAND_DEADLINE_SECONDS
    ) -> "subprocess.CompletedProcess[str]":
        """Run a shell command as root on the host; the exit code is the caller's to judge."""
        return self._ssh(f"sudo -n -- sh -c {shlex.quote(command)}", timeout_seconds)

    def boot(self) -> None:
        """Start the host and wait until systemd says that everything is up.

        Raises:
            HostUnavailableError: it was not up in time; the console's end says why.
        """
        deadline = time.monotonic() + BOOT_DEADLINE_SECONDS
        with self.console_file.open("ab") as console:
            self._init = self._start(console)
        try:
            self._wait_while_booting(
                lambda: Path(f"/sys/class/net/{self.interface}").exists(), deadline, "its network"
            )
            _ip("address", "add", f"{self.control_address}/30", "dev", self.interface)
            _ip("link", "set", self.interface, "up")
            self._wait_while_booting(lambda: self._ssh("true", 6).returncode == 0, deadline, "ssh")
            remaining = max(1.0, deadline - time.monotonic())
            state = self._ssh("systemctl is-system-running --wait", remaining).stdout.strip()
            if state != "running":
                failed = self._ssh("systemctl --failed --no-legend", 10).stdout
                raise HostUnavailableError(f"{self.name} booted into state {state}: {failed}")
        except BaseException:
            self.kill()
            raise

    def power_off(self) -> None:
        """Shut the host down in order, so that its services stop as they would on a real one.

        Raises:
            HostUnavailableError: it was still up after the deadline.
        """
        # The connection may end before the command does; what counts is that the host goes.
        self._ssh("sudo -n systemctl poweroff", 10)
        deadline = time.monotonic() + POWER_OFF_DEADLINE_SECONDS
        while self.is_up:
            if time.monotonic() > deadline:
                raise HostUnavailableError(f"{self.name} did not power off\n{self._console_end()}")
            time.sleep(POLL_SECONDS)
        self.kill()

    def reboot(self) -> None:
        """Shut the host down in order and boot it again with the same disk."""
        self.power_off()
        self.boot()

    @property
    def is_up(self) -> bool:
        """Whether the container runs."""
        return self._init is not None and self._init.poll() is None

    def kill(self) -> None:
        """End every process of the host at once, as a power cut would. Safe to repeat."""
        if self._init is not None:
            if self._init.poll() is None:
                self._init.kill()
            self._init.wait(KILL_DEADLINE_SECONDS)
            self._init = None
        # The kernel takes the interface down a moment after the last process.
        deadline = time.monotonic() + KILL_DEADLINE_SECONDS
        while Path(f"/sys/class/net/{self.interface}").exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        _remove_cgroups(self.name)

    def _start(self, console: IO[bytes]) -> "subprocess.Popen[bytes]":
        nspawn = ["--quiet", "--register=no", f"--machine={self.name}", "--boot"]
        nspawn += ["--network-veth", "--console=read-only", "--link-journal=no"]
        nspawn += ["--resolv-conf=off", "--timezone=off"]
        nspawn += [f"--directory={self._folder / 'merged'}"]
        enter_cgroups = ""
        if not Path("/run/systemd/system").exists():
            # Without a systemd here to ask for a scope, each host needs groups of its own, or
            # two hosts' systemds would take one another's for theirs.
            nspawn.append("--keep-unit")
            for root in CGROUP_ROOTS:
                group = root / f"pointsman-{self.name}"
                enter_cgroups += (
                    f"if [ -d {root} ]; then mkdir -p {group}; echo $$ > {group}/cgroup.procs; fi\n"
                )
        contained = ["unshare", "--mount", "--propagation=private", "--pid", "--fork"]
        contained += ["--kill-child=KILL", "--mount-proc", "sh", "-c", BOOT_SCRIPT, "boot"]
        contained += [str(self._root), str(self._folder), *nspawn]
        enter_cgroups += 'exec "$@"'
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "sh", "-euc", enter_cgroups, "boot", *contained],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            # A Ctrl-C at the terminal is for the test, which then ends the host.
            start_new_session=True,
        )

    def _ssh(self, command: str, timeout_seconds: float) -> "subprocess.CompletedProcess[str]":
        arguments = ["ssh", *self.ssh_options, f"{self.user}@{self.address}", command]
        try:
            return subprocess.run(
                arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            late = f"{command!r} did not end within {timeout_seconds:.0f} s"
            return subprocess.CompletedProcess(error.cmd, 255, "", late)

    def _wait_while_booting(
        self, condition: Callable[[], bool], deadline: float, what: str
    ) -> None:
        while not condition():
            if time.monotonic() > deadline or not self.is_up:
                raise HostUnavailableError(
                    f"{self.name} did not boot: waited for {what}\n{self._console_end()}"
                )
            time.sleep(POLL_SECONDS)

    def _console_end(self) -> str:
        return self.console_file.read_text(encoding="utf-8", errors="replace")[-2000:]


@contextlib.contextmanager
def debian_host() -> Iterator[DebianHost]:
    """Boot a fresh Debian host and end it, whatever happens, when the block ends.

    Raises:
        HostUnavailableError: it cannot be made or does not come up.
    """
    root = debian_root()
    with _slot() as (index, folder):
        host = _prepare(index, folder, root)
        try:
            host.boot()
            yield host
        finally:
            host.kill()


@contextlib.contextmanager
def _slot() -> Iterator[tuple[int, Path]]:
    """Claim a host number that no other process uses, with an empty folder for its disk."""
    hosts = cache_folder() / "hosts"
    hosts.mkdir(parents=True, exist_ok=True)
    for index in range(MAX_HOSTS):
        with (hosts / f"{index}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            folder = hosts / str(index)
            # A run that was killed could not remove its files.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield index, folder
            finally:
                shutil.rmtree(folder)
            return
    raise HostUnavailableError(f"all {MAX_HOSTS} test hosts are in use")


def _prepare(index: int, folder: Path, root: Path) -> DebianHost:
    """Write what makes one host differ from another: its name, address and keys."""
    name = f"pm-host{index}"
    address, control_address = f"10.213.{index}.2", f"10.213.{index}.1"
    for part in ("upper", "work", "merged"):
        (folder / part).mkdir()
    disk = folder / "upper"
    ssh_folder = disk / "etc" / "ssh"
    ssh_folder.mkdir(parents=True)
    _generate_key(ssh_folder / "ssh_host_ed25519_key")
    _generate_key(folder / "operator_key")
    host_key = (ssh_folder / "ssh_host_ed25519_key.pub").read_text(encoding="utf-8")
    (folder / "known_hosts").write_text(f"{address} {host_key}", encoding="utf-8")

    (disk / "etc" / "hostname").write_text(f"{name}\n", encoding="utf-8")
    hosts_file = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
    (disk / "etc" / "hosts").write_text(hosts_file, encoding="utf-8")
    network = disk / "etc" / "systemd" / "network"
    network.mkdir(parents=True)
    # No gateway: a host that asks for anything beyond this machine gets no answer.
    (network / "10-host0.network").write_text(
        f"[Match]\nName=host0\n\n[Network]\nAddress={address}/30\nLinkLocalAddressing=no\n",
        encoding="utf-8",
    )
    home = disk / "home" / OPERATOR
    home_in_root = root / "home" / OPERATOR
    owner = home_in_root.stat()
    ssh_home = home / ".ssh"
    ssh_home.mkdir(parents=True)
    public_key = (folder / "operator_key.pub").read_text(encoding="utf-8")
    (ssh_home / "authorized_keys").write_text(public_key, encoding="utf-8")
    for path in (home, ssh_home, ssh_home / "authorized_keys"):
        os.chown(path, owner.st_uid, owner.st_gid)
    ssh_home.chmod(0o700)
    return DebianHost(
        name=name,
        address=address,
        control_address=control_address,
        user=OPERATOR,
        key_file=folder / "operator_key",
        known_hosts_file=folder / "known_hosts",
        console_file=folder / "console.log",
        _root=root,
        _folder=folder,
    )


def _generate_key(file: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "pointsman-test", "-f", str(file)],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=COMMAND_DEADLINE_SECONDS,
    )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=KILL_DEADLINE_SECONDS)


def _remove_cgroups(name: str) -> None:
    for root in CGROUP_ROOTS:
        group = root / f"pointsman-{name}"
        deadline = time.monotonic() + REAP_SECONDS
        # A group whose last process is just being reaped cannot be removed yet.
        while group.is_dir() and time.monotonic() < deadline:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if group.is_dir():
                time.sleep(POLL_SECONDS)
