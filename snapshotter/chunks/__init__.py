"""L1: views on local disk, which of their chunks are here, and proof that they are right."""
