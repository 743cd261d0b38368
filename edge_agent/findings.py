"""What an examination of this machine has found, and what to do about it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: "ok", "warning" or "error"; `fix` is what to do about the last two."""

    check: str
    level: str
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON object."""
        return asdict(self)
