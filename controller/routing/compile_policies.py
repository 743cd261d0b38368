"""`python -m controller.routing.compile_policies`: compile what serves, and keep its machine code.

A program of its own, because a process that has compiled holds on to hundreds of megabytes that one
which reads machine code back never takes.
"""

from pathlib import Path

from controller.routing.compiled import kept_code
from controller.routing.policies import warm_up


def compiled_mark() -> Path | None:
    """The file that says that this has run here; None where machine code cannot be kept.

    It holds for these sources and this processor, Python and Numba.
    """
    folder = kept_code()
    return folder / "serving-policies" if folder is not None else None


def main() -> None:
    """Compile what is not yet kept."""
    warm_up()
    mark = compiled_mark()
    if mark is not None:
        mark.parent.mkdir(exist_ok=True)
        mark.touch()


if __name__ == "__main__":
    main()
