"""The node daemon: containerd's proxy snapshotter over one road to verified bytes."""

__version__ = "0.1.0"
