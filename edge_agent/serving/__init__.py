"""Work orders and what they cost."""
