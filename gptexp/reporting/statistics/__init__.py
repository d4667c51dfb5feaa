"""What a sweep's losses say: the posterior of its optima, and tests."""
