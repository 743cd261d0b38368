"""Experiments that compare routing policies, with tables and figures."""
