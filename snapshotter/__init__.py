"""The node daemon: containerd's proxy snapshotter over one road to verified bytes."""
