"""Logs and metrics of the controller."""
