"""The commands of `edge-controller`, one module for each group of them."""
