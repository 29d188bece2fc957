"""Layer formats in, indexes out: tar, gzip, zstd, EROFS. Pure: bytes in, values out, no network."""
