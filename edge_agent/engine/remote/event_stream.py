"""Server-sent events: from the bytes of an HTTP body to the data of each event. Pure."""

from typing import Final

_MAX_EVENT_BYTES: Final = 1_048_576


class EventStream:
    """Cuts a body into events, wherever its pieces were cut.

    Lines are decoded when they are whole, so a character that came in two pieces is one.
    Comments, event names and ids are left out: nothing here needs them.

    Source: the HTML standard, "Server-sent events", parsing an event stream.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._data_characters = 0
        self._is_after_return = False
        self._is_first_line = True

    def feed(self, piece: bytes) -> list[str]:
        """Add a piece of the body; the data of the events that it completed.

        Raises:
            ValueError: it is not UTF-8, or an event is longer than any that is meant.
        """
        events: list[str] = []
        if not piece:
            return events
        is_after_return, self._is_after_return = self._is_after_return, piece.endswith(b"\r")
        if is_after_return and piece.startswith(b"\n"):
            piece = piece[1:]  # the second half of a CR LF
        lines = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for part in lines[:-1]:
            self._line += part
            self._end_line(events)
        self._line += lines[-1]
        if len(self._line) + self._data_characters > _MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        return events

    def finish(self) -> list[str]:
        """End the body; the data of a last event that no empty line followed."""
        events: list[str] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _end_line(self, events: list[str]) -> None:
        line = self._line.decode("utf-8")
        self._line.clear()
        if self._is_first_line:
            line = line.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
            self._is_first_line = False
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
            self._data_characters += len(value)

    def _dispatch(self, events: list[str]) -> None:
        if self._data:
            events.append("\n".join(self._data))
        self._data.clear()
        self._data_characters = 0
