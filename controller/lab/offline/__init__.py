"""Offline profiling: standard questions, asked of every destination, graded and kept as data."""
