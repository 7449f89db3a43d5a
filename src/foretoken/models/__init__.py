"""Language models that score token trees: loading, packed weights, slot caches, and the ways a forward is run."""
