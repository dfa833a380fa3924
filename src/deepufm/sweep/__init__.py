"""Grids of runs, and the stores they are written to."""
