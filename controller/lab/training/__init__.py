"""Offline training of what the controller serves; nothing that serves imports it."""
