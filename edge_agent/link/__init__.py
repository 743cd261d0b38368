"""The stream to the controller."""
