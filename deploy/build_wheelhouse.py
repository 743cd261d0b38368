#!/usr/bin/env python3
"""Build the folder of wheels that the Ansible role installs the agent from.

The folder holds every wheel that the agent needs, so a host installs without a network:

    requirements.txt   each wheel by name, version and SHA-256; what pip installs from
    wheelhouse.json    what the wheels were built for, which the role checks on the host first
    *.whl              the agent and all it depends on

Wheels are built for the Python given by `--python` and for this machine's kind of processor:
run this on (or in a container of) one machine of each kind in the fleet.

llama-cpp-python is compiled from source, for about five minutes, unless pip's cache has it.
By default the compiler uses every instruction of this machine's processor. For hosts with an
older one, name the build options in CMAKE_ARGS:

    CMAKE_ARGS="-DGGML_NATIVE=OFF"                                     x86_64 with AVX2
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8-a"         Raspberry Pi 4
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16"  Pi 5, Jetson Orin

Needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
DISTRIBUTION: Final = "pointsman"
MANIFEST_FORMAT: Final = 1
REQUIREMENTS_FILE: Final = "requirements.txt"
MANIFEST_FILE: Final = "wheelhouse.json"
# A first build downloads some 100 MB and compiles llama.cpp, on a Raspberry Pi for an hour.
BUILD_DEADLINE_SECONDS: Final = 2 * 3600.0
PROBE_DEADLINE_SECONDS: Final = 60.0

# Instruction sets that llama.cpp's kernels are written for, as /proc/cpuinfo names them. A build
# made for this machine may use any of them that this machine has.
KERNEL_CPU_FEATURES: Final = (
    "pni ssse3 sse4_1 sse4_2 avx avx2 fma f16c bmi1 bmi2 avx_vnni avx512f avx512bw avx512cd "
    "avx512dq avx512vl avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16 "
    "asimd asimdhp asimddp fphp i8mm bf16 sve sve2 sme"
)
# What ggml turns on for x86_64 when GGML_NATIVE is off, each with its build option.
PORTABLE_X86_FEATURES: Final[Mapping[str, str]] = {
    "sse4_2": "GGML_SSE42",
    "avx": "GGML_AVX",
    "avx2": "GGML_AVX2",
    "bmi2": "GGML_BMI2",
    "fma": "GGML_FMA",
    "f16c": "GGML_F16C",
}
ARM_ARCH_FEATURES: Final[Mapping[str, str]] = {
    "dotprod": "asimddp",
    "fp16": "asimdhp",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
}

PROBE: Final = """
import json, platform, sys
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "machine": platform.machine(),
    "executable": sys.executable,
}))
"""


class WheelhouseError(Exception):
    """The wheelhouse cannot be built; the text says what to do."""


@dataclass(frozen=True)
class Target:
    """The Python that wheels are built for.

    Attributes:
        python: version as "3.11".
        machine: processor kind as `uname -m` has it.
        executable: absolute path of the interpreter.
    """

    python: str
    machine: str
    executable: str


@dataclass(frozen=True)
class Wheel:
    """One wheel file, by the name and version in its file name.

    Attributes:
        name: normalised distribution name.
        version: version as in the file name.
        file: where it lies.
        sha256: hexadecimal digest of the file.
    """

    name: str
    version: str
    file: Path
    sha256: str


def read_wheel(file: Path) -> Wheel:
    """Describe a wheel file.

    Raises:
        WheelhouseError: the file name is not that of a wheel.
    """
    parts = file.stem.split("-")
    if file.suffix != ".whl" or len(parts) not in (5, 6):
        raise WheelhouseError(f"{file.name} is not named like a wheel; delete it and build again")
    name = re.sub(r"[-_.]+", "-", parts[0]).lower()
    return Wheel(name, parts[1], file, hashlib.sha256(file.read_bytes()).hexdigest())


def requirements_text(wheels: Iterable[Wheel]) -> str:
    """Pin every wheel by version and digest, in pip's format, sorted by name."""
    lines = [
        f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}"
        for wheel in sorted(wheels, key=lambda wheel: wheel.name)
    ]
    return "\n".join(lines) + "\n"


def release_name(version: str, requirements: str) -> str:
    """Name a wheelhouse's content: the agent's version and a digest of all wheels.

    The same sources and dependencies give the same name again, and any change gives another,
    so a host can tell whether it already runs exactly this.
    """
    return f"{version}-{hashlib.sha256(requirements.encode()).hexdigest()[:12]}"


def required_glibc(wheels: Iterable[Wheel]) -> str:
    """Return the newest glibc version that a locally built wheel asks for, as "2.34".

    pip itself refuses a manylinux wheel on a host with an older glibc, but a wheel that was
    compiled here carries no such promise, so its libraries' symbol versions are read.
    """
    newest = 0
    for wheel in wheels:
        if not re.search(r"-linux_\w+$", wheel.file.stem):
            continue
        with zipfile.ZipFile(wheel.file) as archive:
            for member in archive.namelist():
                if re.search(r"\.so(\.\d+)*$", member):
                    symbols = re.findall(rb"GLIBC_2\.(\d+)", archive.read(member))
                    newest = max([newest, *map(int, symbols)])
    return f"2.{newest}"


def required_cpu_features(
    cmake_args: str, machine: str, features_here: frozenset[str]
) -> frozenset[str]:
    """Name the processor features that the compiled kernels may use.

    Args:
        cmake_args: the build options, as CMAKE_ARGS gives them.
        machine: processor kind, as `uname -m` has it.
        features_here: the build machine's features, as /proc/cpuinfo names them.

    Returns:
        Names as in /proc/cpuinfo; a host that lacks one dies of an illegal instruction.
    """
    options: dict[str, str] = dict(re.findall(r"-D(\w+)(?::\w+)?=([^\s;]*)", cmake_args))

    def is_off(option: str) -> bool:
        return options.get(option, "").upper() in {"OFF", "0", "FALSE", "NO"}

    if not is_off("GGML_NATIVE"):
        return features_here.intersection(KERNEL_CPU_FEATURES.split())
    if machine == "x86_64":
        return frozenset(
            feature for feature, option in PORTABLE_X86_FEATURES.items() if not is_off(option)
        )
    arm_extensions = options.get("GGML_CPU_ARM_ARCH", "").split("+")[1:]
    return frozenset(
        ARM_ARCH_FEATURES[extension]
        for extension in arm_extensions
        if extension in ARM_ARCH_FEATURES
    )


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Read the features of the first processor from the text of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def probe_python(python: str) -> Target:
    """Ask an interpreter what it is.

    Raises:
        WheelhouseError: it cannot be run, is older than 3.10 or has no pip.
    """
    try:
        answer = subprocess.run(
            [python, "-c", PROBE],
            check=True,
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise WheelhouseError(
            f"cannot run {python}: {error}; name a Python with --python"
        ) from error
    target = Target(**json.loads(answer.stdout))
    if tuple(map(int, target.python.split("."))) < (3, 10):
        raise WheelhouseError(f"{python} is Python {target.python}; the agent needs 3.10 or newer")
    pip = subprocess.run(
        [python, "-m", "pip", "--version"],
        capture_output=True,
        text=True,
        timeout=PROBE_DEADLINE_SECONDS,
        check=False,
    )
    if pip.returncode != 0:
        raise WheelhouseError(
            f"{python} has no pip; make a virtual environment with it "
            f"(`{python} -m venv DIR`) and name that one's Python"
        )
    return target


def wheel_cache(cmake_args: str) -> list[str]:
    """Return the pip options that keep wheels of different build options apart.

    pip's own cache finds a compiled wheel again by its source alone, so a build with other
    CMAKE_ARGS would silently get the wheel of the last build.
    """
    if not cmake_args:
        return []
    root = Path(os.environ.get("POINTSMAN_CACHE") or Path.home() / ".cache" / "pointsman")
    key = hashlib.sha256(cmake_args.encode()).hexdigest()[:12]
    return ["--cache-dir", str(root / f"pip-{key}")]


def build_wheels(
    target: Target, constraints: Path | None, extras: Sequence[str], folder: Path
) -> list[Wheel]:
    """Have pip build or fetch every wheel into an empty folder.

    Raises:
        WheelhouseError: pip failed or took too long; pip's own output says why.
    """
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # ggml builds for no particular processor, without saying so, when this is set.
    environment.pop("SOURCE_DATE_EPOCH", None)
    command = [target.executable, "-m", "pip", "wheel", "--progress-bar", "off"]
    command += ["--wheel-dir", str(folder)]
    command += wheel_cache(environment.get("CMAKE_ARGS", ""))
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    command.append(f"{REPOSITORY}[{','.join(extras)}]")
    say(f"$ {' '.join(command)}")
    try:
        subprocess.run(
            command, check=True, env=environment, timeout=BUILD_DEADLINE_SECONDS, stdout=sys.stderr
        )
    except subprocess.CalledProcessError as error:
        raise WheelhouseError(
            f"pip ended with code {error.returncode}; its output is above. A failed compilation "
            "of llama-cpp-python needs a C++ compiler and the Python headers of the target "
            "(Debian: apt-get install build-essential python3-dev)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise WheelhouseError(
            f"pip did not end within {error.timeout:.0f} s; stopped it"
        ) from error
    return [read_wheel(file) for file in sorted(folder.glob("*.whl"))]


def manifest_for(wheels: Sequence[Wheel], target: Target, cmake_args: str) -> dict[str, object]:
    """Describe a wheelhouse for the role's preflight.

    Raises:
        WheelhouseError: the agent itself is not among the wheels.
    """
    versions = {wheel.name: wheel.version for wheel in wheels}
    if DISTRIBUTION not in versions:
        raise WheelhouseError(
            f"pip built no wheel named {DISTRIBUTION}; run this in its repository"
        )
    features_here = cpu_features(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "format": MANIFEST_FORMAT,
        "release": release_name(versions[DISTRIBUTION], requirements_text(wheels)),
        "python": target.python,
        "machine": target.machine,
        "glibc": required_glibc(wheels),
        "cpu_features": sorted(required_cpu_features(cmake_args, target.machine, features_here)),
        "cmake_args": cmake_args,
    }


def replace_folder(new: Path, output: Path) -> None:
    """Put a finished folder in the place of an older wheelhouse.

    Raises:
        WheelhouseError: the place holds something other than a wheelhouse.
    """
    if output.exists():
        if any(output.iterdir()) and not (output / MANIFEST_FILE).is_file():
            raise WheelhouseError(f"{output} holds something else; name another --output")
        shutil.rmtree(output)
    new.chmod(0o755)
    new.rename(output)


def say(line: str) -> None:
    """Tell a person what happens, on standard error."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def build(python: str, output: Path, constraints: Path | None, extras: Sequence[str]) -> str:
    """Build the wheelhouse at `output` and return its release name.

    An older wheelhouse there is replaced only once the new one is whole.

    Raises:
        WheelhouseError: something is missing or failed; the text says what to do.
    """
    if constraints is not None and not constraints.is_file():
        raise WheelhouseError(f"no constraints file at {constraints}; name one with --constraints")
    target = probe_python(python)
    cmake_args = os.environ.get("CMAKE_ARGS", "")
    say(f"Building wheels for Python {target.python} on {target.machine} into {output}")
    say("(compiling llama-cpp-python takes about five minutes when pip has not cached it)")
    started = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as parent:
        folder = Path(parent) / "wheels"
        folder.mkdir()
        wheels = build_wheels(target, constraints, extras, folder)
        manifest = manifest_for(wheels, target, cmake_args)
        (folder / REQUIREMENTS_FILE).write_text(requirements_text(wheels), encoding="utf-8")
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        replace_folder(folder, output)
    size_mebibytes = sum(file.stat().st_size for file in output.iterdir()) / 2**20
    say(
        f"{len(wheels)} wheels, {size_mebibytes:.0f} MiB, in {time.monotonic() - started:.0f} s; "
        f"hosts need glibc {manifest['glibc']} or newer"
    )
    return str(manifest["release"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, build, print the release name; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_constraints = REPOSITORY / "constraints.txt"
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter of the hosts' Python version, with pip (default: the one running this)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "wheelhouse",
        help="folder to write (%(default)s)",
    )
    parser.add_argument(
        "--constraints",
        type=Path,
        default=default_constraints if default_constraints.is_file() else None,
        help="pip constraints file that pins versions (default: the repository's, if any)",
    )
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        help="a further extra beside `agent`, such as jetson; may be repeated",
    )
    options = parser.parse_args(arguments)
    try:
        release = build(
            options.python, options.output.resolve(), options.constraints, ["agent", *options.extra]
        )
    except WheelhouseError as error:
        say(f"build_wheelhouse: {error}")
        return 1
    sys.stdout.write(release + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
