"""The nodes that are here."""
