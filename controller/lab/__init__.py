"""Offline work: simulator, training, experiments, benchmarks. Serving imports none of it."""
