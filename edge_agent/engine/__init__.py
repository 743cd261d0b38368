"""Engines: what decodes tokens on this node."""
