"""Measurements: each compares Ember with something else in the same run, and prints ratios."""
