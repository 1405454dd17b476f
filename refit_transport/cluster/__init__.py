"""Ray: placement groups, training and generation actors, the synchronizer."""
