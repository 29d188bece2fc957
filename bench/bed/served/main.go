// containerd's own overlayfs snapshotter behind a unix socket, as a proxy snapshotter is.
package main

import (
	"fmt"
	"net"
	"os"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"google.golang.org/grpc"
)

func serve(root, address string) error {
	snapshotter, err := overlay.NewSnapshotter(root)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", address)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	return server.Serve(listener)
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: served ROOT SOCKET")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
