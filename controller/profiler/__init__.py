"""What the router knows about the fleet."""
