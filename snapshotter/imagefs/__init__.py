"""An index and a view become a mounted layer; misses of the kernel become questions to the road."""
