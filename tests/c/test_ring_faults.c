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

static struct ember_ring_request request(unsigned kind, int fd, unsigned slot, unsigned length)
{
	return (struct ember_ring_request){ .kind = (uint8_t)kind, .fd = fd, .slot = slot,
					    .buffer = slot, .length = length,
					    .sync = kind == EMBER_RING_WRITE };
}

static void a_full_kernel_is_asked_again(int error, int expected)
{
	ember_ring *ring = NULL;
	struct ember_ring_request asked;
	struct ember_ring_done done[DEPTH];
	int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	int postponed = -1;
	int over;

	CHECK_EQ(ember_ring_open(DEPTH, arena, 4, 4096, &ring), 0);
	asked = request(EMBER_RING_READ, zero, 0, 4096);
	refuse(error, 1);
	over = ember_ring_turn(ring, &asked, 1, done, &postponed);
	CHECK_EQ(postponed, expected);
	while (over == 0) {
		over = ember_ring_turn(ring, NULL, 0, done, &postponed);
		CHECK_EQ(postponed, 0);
	}
	CHECK_EQ(over, 1);
	CHECK_EQ(done[0].result, 4096);
	close(zero);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_dead_ring_fails_what_was_not_taken(void)
{
	ember_ring *ring = NULL;
	struct ember_ring_request asked[2];
	struct ember_ring_done done[DEPTH];
	struct pollfd event = { .events = POLLIN };
	int pipes[2];
	int postponed;

	CHECK_EQ(pipe(pipes), 0);
	CHECK_EQ(ember_ring_open(DEPTH, arena, 4, 4096, &ring), 0);
	asked[0] = request(EMBER_RING_READ, pipes[0], 0, 6);
	refuse(0, 0);
	CHECK_EQ(ember_ring_turn(ring, asked, 1, done, &postponed), 0);
	asked[0] = request(EMBER_RING_WRITE, pipes[1], 1, 3);
	asked[1] = request(EMBER_RING_SYNC, pipes[1], 2, 0);
	refuse(-EBADFD, 1);
	CHECK_EQ(ember_ring_turn(ring, asked, 2, done, &postponed), 2);
	CHECK_EQ(postponed, 0);
	for (unsigned i = 0; i < 2; i++) {
		CHECK_EQ(done[i].slot, i + 1);
		CHECK_EQ(done[i].result, -EBADFD);
	}
	/* It takes nothing new, and says so at once. */
	asked[0] = request(EMBER_RING_READ, pipes[0], 3, 3);
	CHECK_EQ(ember_ring_turn(ring, asked, 1, done, &postponed), 1);
	CHECK_EQ(done[0].result, -EBADFD);
	CHECK_EQ(ember_ring_close(ring), -EBUSY);
	/* What the kernel took comes back; its rest can't be asked for any more. */
	CHECK_EQ(write(pipes[1], "abc", 3), 3);
	event.fd = ember_ring_eventfd(ring);
	CHECK_EQ(poll(&event, 1, 10000), 1);
	CHECK_EQ(ember_ring_turn(ring, NULL, 0, done, &postponed), 1);
	CHECK_EQ(done[0].slot, 0);
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
	a_full_kernel_is_asked_again(-EAGAIN, 1);
	a_full_kernel_is_asked_again(-EBUSY, 1);
	a_full_kernel_is_asked_again(-EINTR, 0);
	a_dead_ring_fails_what_was_not_taken();
	return 0;
}
