"""Memetic searches: the one of the paper and the one that serves."""
