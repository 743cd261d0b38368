"""The controller: knows the fleet, gathers requests into batches and routes them jointly."""

__version__ = "0.1.0"
