"""One measurement in each file: a module-level ``CASE``, found by `python -m bench`."""
