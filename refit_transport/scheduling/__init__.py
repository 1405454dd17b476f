"""Who sends what to whom, in which order. Pure."""
