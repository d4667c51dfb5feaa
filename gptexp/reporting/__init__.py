"""Reports on runs and sweeps, made from their run directories alone."""
