"""Regions of logical tensors and where they lie on each rank. Pure: the standard library and numpy."""
