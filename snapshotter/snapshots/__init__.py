"""containerd's snapshot model: the metastore, the ten verbs, the overlay mounts."""
