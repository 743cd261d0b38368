"""Files and folders that go away while somebody looks."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def remove_when_listed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Remove a folder at the moment that somebody who saw it in its parent goes into it."""
    list_folder = os.scandir

    def scandir(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(os.fspath(path)) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)


def leave_name_of_nothing(path: Path) -> None:
    """Make a name that a listing shows and that cannot be looked at, as a file just removed."""
    path.symlink_to(path.with_name("nothing"))
