"""Make what lies under proto/gen, or check that what is committed there is current.

That is the stubs that protoc generates, and the modules that both programs share, as they are.
"""

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent
GENERATED = PROTO / "gen"


def generate(target: Path) -> None:
    """Write every stub, with its type stub, and every shared module below `target`."""
    target.mkdir(parents=True, exist_ok=True)
    # protoc finds its plug-ins beside this Python's own commands.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("pointsman/**/*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{resources.files('grpc_tools') / '_proto'}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ]
    )
    if code != 0:
        sys.exit(f"protoc failed with exit code {code}")
    for module in sorted((PROTO / "pointsman").glob("*.py")):
        shutil.copyfile(module, target / "pointsman" / module.name)


def differences(fresh: Path, committed: Path) -> Iterable[str]:
    """Files that are missing, too many or not the same."""
    names = {path.relative_to(fresh) for path in fresh.rglob("*.py*") if path.is_file()}
    known = {
        path.relative_to(committed)
        for path in committed.rglob("*.py*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in sorted(names | known):
        if name not in names:
            yield f"{name}: made from nothing under proto"
        elif name not in known:
            yield f"{name}: missing"
        elif not filecmp.cmp(fresh / name, committed / name, shallow=False):
            yield f"{name}: not what its source under proto gives"


def main() -> None:
    """Generate, or with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when stale")
    if not parser.parse_args().check:
        generate(GENERATED)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        found = list(differences(Path(folder), GENERATED))
    if found:
        sys.exit("\n".join([*found, "Run `make proto` and commit what it writes."]))


if __name__ == "__main__":
    main()
