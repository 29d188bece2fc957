"""gRPC over HTTP/2 on the event loop's own thread, as far as this daemon and containerd use it."""
