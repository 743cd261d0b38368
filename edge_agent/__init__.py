"""The edge agent: runs quantised models on one node and answers the controller's orders."""

__version__ = "0.1.0"
