"""Indexes that travel: as OCI artifacts, signed, built where an image is shipped, used by nodes."""
