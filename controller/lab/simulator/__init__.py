"""A simulated cluster that the serving policies run in, unchanged."""
