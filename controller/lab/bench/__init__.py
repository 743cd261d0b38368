"""Measurements of the controller's parts, runnable from the command line."""
