"""RAPL on captured powercap trees."""

from pathlib import Path

import pytest

from edge_agent.sensors.base import Coverage, NoData, PowerReading
from edge_agent.sensors.rapl import RaplSensor
from tests.fakes.sensors import power_of
from tests.fixtures.sysfs.boards import write, x86_rapl, x86_vm

CAP = "sys/class/powercap"


def set_energy(root: Path, package: int, microjoules: int) -> None:
    (root / f"{CAP}/intel-rapl:{package}/energy_uj").write_text(f"{microjoules}\n")


def read(sensor: RaplSensor, now: float) -> PowerReading:
    return power_of(sensor.read(now))


def test_packages_are_added_and_what_they_contain_or_contains_them_is_not(tmp_path: Path) -> None:
    sensor = RaplSensor(write(tmp_path, x86_rapl()))
    first = read(sensor, 10.0)
    assert (sensor.name, first.coverage) == ("rapl", Coverage.PACKAGE)
    assert first.power_watts is None
    assert "psys" in first.detail
    set_energy(tmp_path, 0, 31_000_000)
    set_energy(tmp_path, 1, 15_000_000)
    second = read(sensor, 12.0)
    assert second.energy_joules == pytest.approx(40.0)
    assert second.power_watts == pytest.approx(20.0)


def test_one_package_wraps_at_its_own_range(tmp_path: Path) -> None:
    write(tmp_path, x86_rapl())
    (tmp_path / f"{CAP}/intel-rapl:1/max_energy_range_uj").write_text("65532610987\n")
    set_energy(tmp_path, 1, 65_532_000_000)
    sensor = RaplSensor(tmp_path)
    read(sensor, 0.0)
    set_energy(tmp_path, 0, 3_000_000)
    set_energy(tmp_path, 1, 389_012)
    assert read(sensor, 1.0).energy_joules == pytest.approx(2.0 + 1.0)


def test_counter_that_jumped_leaves_its_interval_out(tmp_path: Path) -> None:
    sensor = RaplSensor(write(tmp_path, x86_rapl()))
    read(sensor, 0.0)
    set_energy(tmp_path, 1, 0)  # a reset looks like a wrap of 262 kJ
    assert isinstance(sensor.read(1.0), NoData)
    assert sensor.dropped_readings == 1
    set_energy(tmp_path, 1, 5_000_000)
    assert read(sensor, 2.0).energy_joules == pytest.approx(5.0)


def test_permission_that_is_denied_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of mode 0 would not do where the tests run as root."""
    read_text = Path.read_text

    def refuse(path: Path, *args: object, **kwargs: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path)

    sensor = RaplSensor(write(tmp_path, x86_rapl()))
    monkeypatch.setattr(Path, "read_text", refuse)
    answer = sensor.read(0.0)
    assert isinstance(answer, NoData)
    assert "permission denied" in answer.reason
    assert "tmpfiles" in answer.fix


def test_virtual_machine_has_none_and_nothing_to_mend(tmp_path: Path) -> None:
    answer = RaplSensor(write(tmp_path, x86_vm())).read(0.0)
    assert isinstance(answer, NoData)
    assert answer.fix == ""


def test_dangling_links_of_a_container_are_no_domains(tmp_path: Path) -> None:
    folder = tmp_path / CAP
    folder.mkdir(parents=True)
    (folder / "intel-rapl:0").symlink_to(tmp_path / "not/there")
    assert isinstance(RaplSensor(tmp_path).read(0.0), NoData)
