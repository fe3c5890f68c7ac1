"""Moving weights from the trainer into the replicas: where they come from, and how they travel."""
