"""A lab's own parts of an experiment."""
