import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.hosts.nspawn import CGROUP_ROOTS, DebianHost, debian_host, why_no_hosts

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # the first run makes the root file system
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]

BOOT_AND_WAIT = """
import time
from tests.e2e.hosts.nspawn import debian_host
with debian_host() as host:
    print(host.name, host.interface, flush=True)
    time.sleep(60)
"""


def wait_until_gone(name: str) -> list[str]:
    """Return what is still there of a host after giving it a moment to go."""
    deadline = time.monotonic() + 10
    while True:
        left = [f"interface ve-{name}"] if Path(f"/sys/class/net/ve-{name}").exists() else []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if f"--machine={name}".encode() in command:
                left.append(f"process {process.name}")
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        left += [line for line in mounts if line.startswith("overlay") and "/hosts/" in line]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def test_host_boots_whole_keeps_its_disk_over_a_reboot_and_leaves_nothing() -> None:
    with debian_host() as host:
        assert host.run("id --user").stdout.strip() == "0"
        assert host.run("cat /etc/hostname").stdout.strip() == host.name
        assert host.run("echo kept > /var/lib/kept").returncode == 0
        first_boot = host.run("cat /proc/sys/kernel/random/boot_id").stdout

        host.reboot()

        assert host.run("cat /var/lib/kept").stdout.strip() == "kept"
        assert host.run("cat /proc/sys/kernel/random/boot_id").stdout != first_boot
        name = host.name
    assert wait_until_gone(name) == []
    assert not any((root / f"pointsman-{name}").exists() for root in CGROUP_ROOTS)


def test_two_hosts_at_once_do_not_touch_each_other() -> None:
    def services(host: DebianHost) -> str:
        return host.run("systemctl is-active systemd-logind; systemctl show ssh -p MainPID").stdout

    with debian_host() as first:
        before = services(first)
        with debian_host() as second:
            assert second.address != first.address
            assert second.run("cat /etc/hostname").stdout.strip() == second.name
        assert services(first) == before


def test_host_ends_with_a_test_run_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BOOT_AND_WAIT], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        try:
            name, interface = run.stdout.readline().split()
            assert Path(f"/sys/class/net/{interface}").exists()
        finally:
            os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
    assert wait_until_gone(name) == []
