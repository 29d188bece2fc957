"""The command line: a thin face over the daemon's control socket."""

import os

# Credential helpers are started beside calls in progress. gRPC's handlers for forks cannot run
# then, are not needed before an exec, and would write a line of their own into the log each time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
