"""The command line: a thin face over the daemon's control socket."""
