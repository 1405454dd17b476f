"""Which boxes move: exact intersection, coverage proof, routing of parameters to transports. Pure."""
