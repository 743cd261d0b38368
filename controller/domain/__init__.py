"""Values that the whole controller speaks in; no I/O, no clock."""
