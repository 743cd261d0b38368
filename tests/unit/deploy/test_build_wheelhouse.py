import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "build_wheelhouse.py"


def load_script() -> ModuleType:
    """Import the script by its path: it is a file to run, not part of a package."""
    spec = importlib.util.spec_from_file_location("build_wheelhouse", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build_wheelhouse = load_script()


def wheel_at(folder: Path, name: str, library: bytes = b"") -> Path:
    file = folder / name
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("package/lib/libsome.so.0.5.0", library)
    return file


def test_wheel_is_read_by_its_normalised_name(tmp_path: Path) -> None:
    file = wheel_at(tmp_path, "Llama_CPP.python-0.3.36-py3-none-linux_x86_64.whl")
    wheel = build_wheelhouse.read_wheel(file)
    assert (wheel.name, wheel.version) == ("llama-cpp-python", "0.3.36")
    assert len(wheel.sha256) == 64


def test_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pointsman-0.1.0.tar.gz"
    file.write_bytes(b"")
    with pytest.raises(build_wheelhouse.WheelhouseError, match="not named like a wheel"):
        build_wheelhouse.read_wheel(file)


def test_release_name_changes_with_any_wheel_and_only_then(tmp_path: Path) -> None:
    first = build_wheelhouse.read_wheel(wheel_at(tmp_path, "a-1-py3-none-any.whl"))
    second = build_wheelhouse.read_wheel(wheel_at(tmp_path, "b-2-py3-none-any.whl"))
    changed = build_wheelhouse.read_wheel(wheel_at(tmp_path, "b-2-py3-none-any.whl", b"other"))

    def release(*wheels: object) -> object:
        return build_wheelhouse.release_name("1", build_wheelhouse.requirements_text(wheels))

    assert release(first, second) == release(second, first)
    assert release(first, second) != release(first, changed)


def test_glibc_is_read_from_locally_built_wheels_only(tmp_path: Path) -> None:
    built_here = wheel_at(
        tmp_path, "a-1-cp311-cp311-linux_x86_64.whl", b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.27\0"
    )
    checked_by_pip = wheel_at(
        tmp_path, "b-1-cp311-cp311-manylinux_2_17_x86_64.whl", b"\0GLIBC_2.99\0"
    )
    wheels = [build_wheelhouse.read_wheel(file) for file in (built_here, checked_by_pip)]
    assert build_wheelhouse.required_glibc(wheels) == "2.34"


@pytest.mark.parametrize(
    ("cmake_args", "machine", "required"),
    [
        ("", "x86_64", {"avx2", "avx512f"}),
        ("-DGGML_CUDA=ON", "x86_64", {"avx2", "avx512f"}),
        ("-DGGML_NATIVE=OFF", "x86_64", {"sse4_2", "avx", "avx2", "bmi2", "fma", "f16c"}),
        (
            "-DGGML_NATIVE:BOOL=off -DGGML_AVX2=OFF -DGGML_FMA=OFF",
            "x86_64",
            {"sse4_2", "avx", "bmi2", "f16c"},
        ),
        ("-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8-a", "aarch64", set()),
        (
            "-DGGML_NATIVE=OFF;-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16",
            "aarch64",
            {"asimddp", "asimdhp"},
        ),
    ],
)
def test_processor_features_follow_from_the_build_options(
    cmake_args: str, machine: str, required: set[str]
) -> None:
    here = frozenset({"avx2", "avx512f", "hypervisor"})
    assert build_wheelhouse.required_cpu_features(cmake_args, machine, here) == required


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        ("processor : 0\nflags\t\t: fpu avx2\nbugs\t: none\nflags\t\t: other\n", {"fpu", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp\n", {"fp", "asimd", "asimddp"}),
        ("processor\t: 0\n", set()),
    ],
)
def test_processor_features_are_read_on_both_kinds_of_machine(
    cpuinfo: str, features: set[str]
) -> None:
    assert build_wheelhouse.cpu_features(cpuinfo) == features


def test_wheels_of_other_build_options_do_not_share_a_cache() -> None:
    assert build_wheelhouse.wheel_cache("") == []
    portable = build_wheelhouse.wheel_cache("-DGGML_NATIVE=OFF")
    assert portable != build_wheelhouse.wheel_cache("-DGGML_CUDA=ON")


def test_folder_with_other_content_is_not_overwritten(tmp_path: Path) -> None:
    new, output = tmp_path / "new", tmp_path / "output"
    new.mkdir()
    output.mkdir()
    (output / "thesis.odt").write_text("dear")
    with pytest.raises(build_wheelhouse.WheelhouseError, match="holds something else"):
        build_wheelhouse.replace_folder(new, output)
    assert (output / "thesis.odt").read_text() == "dear"


def test_older_wheelhouse_is_replaced_whole(tmp_path: Path) -> None:
    new, output = tmp_path / "new", tmp_path / "output"
    for folder in (new, output):
        folder.mkdir()
        (folder / "wheelhouse.json").write_text(json.dumps({"release": folder.name}))
    (output / "old-1-py3-none-any.whl").write_bytes(b"")
    build_wheelhouse.replace_folder(new, output)
    assert [file.name for file in output.iterdir()] == ["wheelhouse.json"]
    assert json.loads((output / "wheelhouse.json").read_text())["release"] == "new"


def test_missing_python_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_wheelhouse.main(["--python", "no-such-python", "--output", "unused"]) == 1
    assert "name a Python with --python" in capsys.readouterr().err
