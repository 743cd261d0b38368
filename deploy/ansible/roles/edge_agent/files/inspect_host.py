"""Print, as one JSON object, what the role's preflight needs to know about a host.

Run by the host's own Python with one argument: the interpreter's version does not matter
beyond 3.6, because an old one is exactly what preflight has to report.
"""

import ctypes
import importlib
import json
import os
import platform
import sys

# ensurepip is what Debian leaves out of python3 and ships in python3-venv.
MODULES = ("venv", "ensurepip")
# llama.cpp's libraries link against these; a minimal Debian lacks the first.
LIBRARIES = ("libgomp.so.1", "libstdc++.so.6")


def can_import(name):
    """Tell whether a standard module is installed."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def can_load(name):
    """Tell whether the loader finds a shared library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def cpu_features():
    """Return the features of the first processor, as /proc/cpuinfo names them."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        for line in cpuinfo:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []


print(  # noqa: T201 - the answer to the role
    json.dumps(
        {
            "python": "{}.{}".format(*sys.version_info[:2]),
            "machine": platform.machine(),
            "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[-1],
            "is_run_by_systemd": os.path.isdir("/run/systemd/system"),
            "missing_modules": [name for name in MODULES if not can_import(name)],
            "missing_libraries": [name for name in LIBRARIES if not can_load(name)],
            "cpu_features": cpu_features(),
        }
    )
)
