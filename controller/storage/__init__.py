"""What the controller keeps over restarts: its seams, and their implementations."""
