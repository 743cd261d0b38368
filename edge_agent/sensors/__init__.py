"""Sensors: what this board can say about itself."""
