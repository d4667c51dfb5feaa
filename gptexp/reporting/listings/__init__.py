"""Runs as read from their directories, and tables of them."""
