"""Model files: the catalogue, where a file comes from and how it is verified."""
