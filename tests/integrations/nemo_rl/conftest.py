"""The double is a package of its own, for processes that are told of it."""

collect_ignore = ["double"]
