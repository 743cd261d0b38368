"""The routing core: from a batch and a snapshot to a decision. Pure."""
