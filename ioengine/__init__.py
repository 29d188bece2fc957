"""Bytes, descriptors and buffers. Knows no digest, no image and no registry."""
