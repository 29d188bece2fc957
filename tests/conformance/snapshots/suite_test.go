// Runs containerd's own snapshotter suite, through its proxy client, against Ember's socket.
//
// The suite wants a snapshotter on an empty root for each test, so each gets a server of its own.
// EMBER_SERVE is the command that starts one: it is given a root and a socket as its last two
// arguments and prints "ready" when it answers.
package snapshots

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	api "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/core/snapshots/testsuite"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	startLimit = 60 * time.Second
	stopLimit  = 30 * time.Second
)

func TestEmber(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("the suite mounts, so it must run as root")
	}
	command := strings.Fields(os.Getenv("EMBER_SERVE"))
	if len(command) == 0 {
		t.Fatal("EMBER_SERVE must be the command that serves a ROOT on a SOCKET")
	}
	testsuite.SnapshotterSuite(t, "overlayfs", starter(command))
}

func starter(command []string) testsuite.SnapshotterFunc {
	return func(_ context.Context, root string) (snapshots.Snapshotter, func() error, error) {
		return start(command, root)
	}
}

// start runs one server; the function it returns ends it and says so if it would not end cleanly.
func start(command []string, root string) (snapshots.Snapshotter, func() error, error) {
	socket := filepath.Join(filepath.Dir(root), "ember.sock")
	arguments := append(append([]string{}, command[1:]...), root, socket)
	server := exec.Command(command[0], arguments...)
	server.Stderr = os.Stderr
	output, err := server.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	if err := awaitReady(bufio.NewScanner(output)); err != nil {
		server.Process.Kill()
		server.Wait()
		return nil, nil, err
	}
	connection, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		server.Process.Kill()
		server.Wait()
		return nil, nil, err
	}
	stop := func() error {
		connection.Close()
		return end(server)
	}
	return proxy.NewSnapshotter(api.NewSnapshotsClient(connection), "overlayfs"), stop, nil
}

func awaitReady(lines *bufio.Scanner) error {
	ready := make(chan bool, 1)
	go func() {
		for lines.Scan() {
			if lines.Text() == "ready" {
				ready <- true
			}
		}
		close(ready)
	}()
	select {
	case is := <-ready:
		if !is {
			return fmt.Errorf("the server ended before it was ready")
		}
		return nil
	case <-time.After(startLimit):
		return fmt.Errorf("the server was not ready within %s", startLimit)
	}
}

func end(server *exec.Cmd) error {
	server.Process.Signal(syscall.SIGTERM)
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(stopLimit):
		server.Process.Kill()
		return fmt.Errorf("the server did not end within %s", stopLimit)
	}
}
