/*
 * ring.c: an io_uring ring over one arena of equal buffers: whether it is allowed, set-up, end.
 *
 * The submission queue has room for every slot's two entries and the completion queue for twice
 * that: neither can run over. The arena is the caller's; it is pinned where the limits allow.
 */
#include "ring.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_DEPTH 4096u

/*
 * Ask a child whether io_uring_setup(2) is let through: a seccomp filter may kill its caller.
 * Returns 0, or the child's -errno; -ENOTRECOVERABLE if it was killed, by the signal *killed_by.
 */
int ember_ring_allowed(int *killed_by)
{
	int status = 0;
	pid_t child;

	*killed_by = 0;
	child = fork();
	if (child < 0)
		return -errno;
	if (child == 0) {
		struct io_uring_params params;

		prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
		signal(SIGSYS, SIG_DFL);
		memset(&params, 0, sizeof(params));
		_exit(syscall(__NR_io_uring_setup, 4, &params) < 0 ? errno & 0xff : 0);
	}
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	if (WIFSIGNALED(status)) {
		*killed_by = WTERMSIG(status);
		return -ENOTRECOVERABLE;
	}
	return -WEXITSTATUS(status);
}

/* The newest set-up flags the kernel takes; older kernels answer EINVAL to what they don't know. */
static int set_up(struct io_uring *uring, unsigned depth)
{
	static const unsigned flags[] = {
		IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER,
		IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN,
		0,
	};
	int result = -EINVAL;

	for (unsigned i = 0; i < sizeof(flags) / sizeof(flags[0]) && result == -EINVAL; i++) {
		struct io_uring_params params;

		memset(&params, 0, sizeof(params));
		params.flags = flags[i] | IORING_SETUP_CQSIZE;
		params.cq_entries = 4 * depth;
		result = io_uring_queue_init_params(2 * depth, uring, &params);
	}
	return result;
}

static int check_opcodes(struct io_uring *uring)
{
	static const int needed[] = { IORING_OP_READ,	    IORING_OP_WRITE, IORING_OP_READ_FIXED,
				      IORING_OP_WRITE_FIXED, IORING_OP_FSYNC };
	struct io_uring_probe *probe = io_uring_get_probe_ring(uring);
	int result = 0;

	if (!probe)
		return -EOPNOTSUPP;
	for (unsigned i = 0; i < sizeof(needed) / sizeof(needed[0]); i++)
		if (!io_uring_opcode_supported(probe, needed[i]))
			result = -EOPNOTSUPP;
	io_uring_free_probe(probe);
	return result;
}

/* Pin the arena. Where RLIMIT_MEMLOCK forbids it the ring works all the same, unpinned. */
static int register_arena(struct ember_ring *ring)
{
	struct iovec *parts = calloc(ring->buffers, sizeof(*parts));
	int result;

	if (!parts)
		return -ENOMEM;
	for (unsigned i = 0; i < ring->buffers; i++) {
		parts[i].iov_base = ring->arena + (size_t)i * ring->buffer_bytes;
		parts[i].iov_len = ring->buffer_bytes;
	}
	result = io_uring_register_buffers(&ring->uring, parts, ring->buffers);
	free(parts);
	ring->registered = result == 0;
	if (result == -ENOMEM || result == -EPERM || result == -EOPNOTSUPP)
		return 0;
	return result;
}

/*
 * Open a ring for `depth` requests in flight over `buffers` buffers of `buffer_bytes` each, which
 * lie one behind the other at `arena`. -EINVAL names sizes out of range; else what the kernel said.
 */
int ember_ring_open(unsigned depth, void *arena, unsigned buffers, unsigned buffer_bytes,
		    ember_ring **out)
{
	struct ember_ring *ring = NULL;
	int have_uring = 0;
	int result;

	*out = NULL;
	if (depth == 0 || depth > MAX_DEPTH || !arena || buffers == 0 || buffer_bytes == 0 ||
	    buffer_bytes > INT32_MAX)
		return -EINVAL;
	ring = calloc(1, sizeof(*ring));
	if (!ring)
		return -ENOMEM;
	ring->event = -1;
	ring->depth = depth;
	ring->arena = arena;
	ring->buffers = buffers;
	ring->buffer_bytes = buffer_bytes;
	result = -ENOMEM;
	ring->slots = calloc(depth, sizeof(*ring->slots));
	if (!ring->slots)
		goto out;
	result = set_up(&ring->uring, depth);
	if (result < 0)
		goto out;
	have_uring = 1;
	result = check_opcodes(&ring->uring);
	if (result < 0)
		goto out;
	ring->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	result = ring->event < 0 ? -errno : io_uring_register_eventfd(&ring->uring, ring->event);
	if (result < 0)
		goto out;
	io_uring_register_ring_fd(&ring->uring); /* saves a look-up; refused before 5.18 */
	result = register_arena(ring);
out:
	if (result < 0) {
		if (have_uring)
			io_uring_queue_exit(&ring->uring);
		if (ring->event >= 0)
			close(ring->event);
		free(ring->slots);
		free(ring);
		return result;
	}
	*out = ring;
	return 0;
}

/* -EBUSY while requests are in flight: the kernel may still write into the arena. */
int ember_ring_close(ember_ring *ring)
{
	if (!ring)
		return 0;
	if (ring->active)
		return -EBUSY;
	io_uring_queue_exit(&ring->uring);
	close(ring->event);
	free(ring->slots);
	free(ring);
	return 0;
}

int ember_ring_eventfd(const ember_ring *ring)
{
	return ring->event;
}

int ember_ring_registered(const ember_ring *ring)
{
	return ring->registered;
}

int ember_ring_active(const ember_ring *ring)
{
	return (int)ring->active;
}
