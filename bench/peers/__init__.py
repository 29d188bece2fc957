"""Other lazy snapshotters, run as their own documents say, where their programs are on the path.

Each is a Peer: what it needs, how its daemon is started, and how an image is made ready for it.
"""
