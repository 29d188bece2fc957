"""The test bed: a real registry, a real containerd and real images behind one shaped link.

Everything lives in one directory and one network namespace per bed, so that two beds never meet
and one that was killed can be cleared away by the next.
"""
