"""From admitted requests to dispatched ones."""
