/*
 * The ring when the kernel refuses a submission: for now (try again) or for good (every request
 * that it did not take fails, none hangs). io_uring_submit is wrapped by the linker.
 */
#include "check.h"
#include "ember_io.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define DEPTH 4u

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);

static int refusal; /* what the next submission returns; 0: the real thing */
static int refusals;
static unsigned char arena[4][4096] __attribute__((aligned(4096)));

int __wrap_io_uring_submit(struct io_uring *ring)
{
	if (refusal == 0 || refusals == 0)
		return __real_io_uring_submit(ring);
	refusals--;
	return refusal;
}

static void refuse(int error, int times)
{
	refusal = error;
	refusals = times;
}

static void a_full_kernel_is_asked_again(int error)
{
	ember_ring *ring = NULL;
	struct ember_ring_done done[DEPTH];
	struct pollfd event = { .events = POLLIN };
	int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);

	CHECK_EQ(ember_ring_open(DEPTH, arena, 4, 4096, &ring), 0);
	CHECK(ember_ring_read(ring, zero, 0, 4096, 0) >= 0);
	refuse(error, 1);
	if (error != -EINTR)
		CHECK_EQ(ember_ring_submit(ring), -EAGAIN);
	CHECK_EQ(ember_ring_submit(ring), 0);
	event.fd = ember_ring_eventfd(ring);
	CHECK_EQ(poll(&event, 1, 10000), 1);
	CHECK_EQ(ember_ring_reap(ring, done, DEPTH), 1);
	CHECK_EQ(done[0].result, 4096);
	close(zero);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_dead_ring_fails_what_was_not_taken(void)
{
	ember_ring *ring = NULL;
	struct ember_ring_done done[DEPTH];
	struct pollfd event = { .events = POLLIN };
	int pipes[2];
	int taken, refused_write, refused_sync;

	CHECK_EQ(pipe(pipes), 0);
	CHECK_EQ(ember_ring_open(DEPTH, arena, 4, 4096, &ring), 0);
	taken = ember_ring_read(ring, pipes[0], 0, 6, 0);
	refuse(0, 0);
	CHECK_EQ(ember_ring_submit(ring), 0);
	refused_write = ember_ring_write(ring, pipes[1], 1, 3, 0, 1);
	refused_sync = ember_ring_sync(ring, pipes[1]);
	refuse(-EBADFD, 1);
	CHECK_EQ(ember_ring_submit(ring), -EBADFD);
	CHECK_EQ(ember_ring_submit(ring), -EBADFD);
	CHECK_EQ(ember_ring_read(ring, pipes[0], 2, 3, 0), -EBADFD);
	event.fd = ember_ring_eventfd(ring);
	CHECK_EQ(poll(&event, 1, 10000), 1);
	CHECK_EQ(ember_ring_reap(ring, done, DEPTH), 2);
	for (int i = 0; i < 2; i++) {
		CHECK((int)done[i].slot == refused_write || (int)done[i].slot == refused_sync);
		CHECK_EQ(done[i].result, -EBADFD);
	}
	CHECK_EQ(ember_ring_close(ring), -EBUSY);
	/* What the kernel took comes back; its rest can't be asked for any more. */
	CHECK_EQ(write(pipes[1], "abc", 3), 3);
	CHECK_EQ(poll(&event, 1, 10000), 1);
	CHECK_EQ(ember_ring_reap(ring, done, DEPTH), 1);
	CHECK_EQ(done[0].slot, taken);
	CHECK_EQ(done[0].result, -EBADFD);
	close(pipes[0]);
	close(pipes[1]);
	CHECK_EQ(ember_ring_close(ring), 0);
}

int main(void)
{
	int killed_by;
	int allowed = ember_ring_allowed(&killed_by);

	CHECK(allowed <= 0);
	if (allowed < 0) {
		printf("test_ring_faults: this machine denies io_uring (%s): nothing to break\n",
		       strerror(-allowed));
		return 0;
	}
	a_full_kernel_is_asked_again(-EAGAIN);
	a_full_kernel_is_asked_again(-EBUSY);
	a_full_kernel_is_asked_again(-EINTR);
	a_dead_ring_fails_what_was_not_taken();
	return 0;
}
