"""What a request is expected to bring at each destination: quality and answer length."""
