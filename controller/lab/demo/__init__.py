"""The demonstration: a small fleet on one machine."""
