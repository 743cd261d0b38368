"""`edge-controller lab`, one module for each group of commands."""
