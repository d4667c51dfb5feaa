"""Vega-Lite specifications of all figures."""
