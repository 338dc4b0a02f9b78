"""Two federated methods for FeDecider: one for each of its tracks."""
