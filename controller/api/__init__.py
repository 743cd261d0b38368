"""What clients and operators ask for."""
