from pathlib import Path

import pytest

from edge_agent.identity import describe_host


def write(root: Path, name: str, content: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_board_names_itself_in_the_device_tree(tmp_path: Path) -> None:
    write(tmp_path, "proc/device-tree/model", b"Raspberry Pi 5 Model B Rev 1.0\0")
    write(tmp_path, "sys/class/dmi/id/product_name", b"not asked\n")
    write(tmp_path, "etc/os-release", b'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12"\n')
    host = describe_host(tmp_path)
    assert host.hardware == "Raspberry Pi 5 Model B Rev 1.0"
    assert host.operating_system == "Debian GNU/Linux 12"
    assert host.cpu_cores >= 1
    assert host.memory_bytes > 0


def test_machine_without_a_device_tree_names_itself_in_dmi(tmp_path: Path) -> None:
    write(tmp_path, "proc/device-tree/model", b"\0")
    write(tmp_path, "sys/class/dmi/id/product_name", b"Standard PC (Q35)\n")
    assert describe_host(tmp_path).hardware == "Standard PC (Q35)"


def test_host_that_says_nothing_is_described_generically(tmp_path: Path) -> None:
    """A missing path is no error."""
    host = describe_host(tmp_path)
    assert host.hardware.endswith(" host")
    assert host.operating_system


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"PRETTY_NAME=\xff\n", b"NAME=x\n"])
def test_description_in_another_encoding_does_not_stop_the_agent(
    tmp_path: Path, content: bytes
) -> None:
    write(tmp_path, "etc/os-release", content)
    write(tmp_path, "proc/device-tree/model", b"Bo\xffard\0")
    host = describe_host(tmp_path)
    assert host.operating_system
    assert host.hardware.startswith("Bo")


def test_this_host_can_be_described() -> None:
    host = describe_host()
    assert host.hardware
    assert "\0" not in host.hardware
