"""Ranks: the rank of this process, the process group, and the reduction of gradients."""
