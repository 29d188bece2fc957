/*
 * What must hold of the ring on a real kernel: bytes, short transfers, order of sync, bounds.
 */
#include "check.h"
#include "ember_io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BUFFERS 4u
#define BUFFER_BYTES 65536u
#define DEPTH 8u

static uint8_t *arena;

static int scratch(int flags)
{
	char name[] = "./bin/ring-scratch-XXXXXX";
	int fd = mkostemp(name, flags);

	CHECK(fd >= 0);
	CHECK_EQ(unlink(name), 0);
	return fd;
}

static uint8_t *buffer(unsigned number)
{
	return arena + (size_t)number * BUFFER_BYTES;
}

static void fill(unsigned number, uint8_t seed)
{
	for (unsigned i = 0; i < BUFFER_BYTES; i++)
		buffer(number)[i] = (uint8_t)(i * 7 + (i >> 8) + seed);
}

static ember_ring *opened(unsigned depth)
{
	ember_ring *ring = NULL;

	CHECK_EQ(ember_ring_open(depth, arena, BUFFERS, BUFFER_BYTES, &ring), 0);
	CHECK(ring != NULL);
	return ring;
}

static struct ember_ring_request reading(int fd, unsigned number, unsigned length, uint64_t offset)
{
	return (struct ember_ring_request){ .kind = EMBER_RING_READ, .fd = fd, .buffer = number,
					    .slot = number, .length = length, .offset = offset };
}

static struct ember_ring_request writing(int fd, unsigned number, unsigned length, uint64_t offset,
					 int sync)
{
	return (struct ember_ring_request){ .kind = EMBER_RING_WRITE, .fd = fd, .buffer = number,
					    .slot = number, .length = length, .offset = offset,
					    .sync = (uint8_t)sync };
}

static struct ember_ring_request syncing(int fd)
{
	return (struct ember_ring_request){ .kind = EMBER_RING_SYNC, .fd = fd, .slot = DEPTH - 1 };
}

static int turn(ember_ring *ring, const struct ember_ring_request *requests, unsigned count,
		struct ember_ring_done *done)
{
	int postponed = -1;
	int over = ember_ring_turn(ring, requests, count, done, &postponed);

	CHECK_EQ(postponed, 0);
	return over;
}

/* Wait as an event loop would; returns how many requests the next turn brought. */
static int wait_and_turn(ember_ring *ring, struct ember_ring_done *done)
{
	struct pollfd event = { .fd = ember_ring_eventfd(ring), .events = POLLIN };

	CHECK_EQ(poll(&event, 1, 10000), 1);
	return turn(ring, NULL, 0, done);
}

/* One request from its start to its end. */
static int64_t finish(ember_ring *ring, struct ember_ring_request request)
{
	struct ember_ring_done done[DEPTH] = { 0 };
	int over = turn(ring, &request, 1, done);

	while (over == 0)
		over = wait_and_turn(ring, done);
	CHECK_EQ(over, 1);
	CHECK_EQ(done[0].slot, request.slot);
	return done[0].result;
}

static void what_was_written_is_read_back(int flags)
{
	ember_ring *ring = opened(DEPTH);
	int fd = scratch(flags);

	fill(0, 3);
	memset(buffer(1), 0, BUFFER_BYTES);
	CHECK_EQ(finish(ring, writing(fd, 0, BUFFER_BYTES, 8192, 0)), BUFFER_BYTES);
	CHECK_EQ(finish(ring, syncing(fd)), 0);
	CHECK_EQ(finish(ring, reading(fd, 1, BUFFER_BYTES, 8192)), BUFFER_BYTES);
	CHECK_EQ(memcmp(buffer(0), buffer(1), BUFFER_BYTES), 0);
	CHECK_EQ(finish(ring, writing(fd, 0, 4096, 0, 1)), 4096);
	close(fd);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_read_ends_at_the_end_of_the_file(int flags)
{
	ember_ring *ring = opened(DEPTH);
	int fd = scratch(flags);

	CHECK_EQ(ftruncate(fd, 10000), 0);
	CHECK_EQ(finish(ring, reading(fd, 0, BUFFER_BYTES, 0)), 10000);
	CHECK_EQ(finish(ring, reading(fd, 0, BUFFER_BYTES, 4096)), 5904);
	CHECK_EQ(finish(ring, reading(fd, 0, BUFFER_BYTES, 65536)), 0);
	close(fd);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_short_read_is_continued(void)
{
	ember_ring *ring = opened(DEPTH);
	struct ember_ring_request request;
	struct ember_ring_done done[DEPTH];
	int pipes[2];
	int over;

	CHECK_EQ(pipe(pipes), 0);
	request = reading(pipes[0], 2, 8, 0);
	CHECK_EQ(turn(ring, &request, 1, done), 0);
	CHECK_EQ(write(pipes[1], "abc", 3), 3);
	CHECK_EQ(wait_and_turn(ring, done), 0);
	CHECK_EQ(ember_ring_active(ring), 1);
	CHECK_EQ(ember_ring_close(ring), -EBUSY);
	CHECK_EQ(write(pipes[1], "defgh", 5), 5);
	while ((over = wait_and_turn(ring, done)) == 0)
		;
	CHECK_EQ(over, 1);
	CHECK_EQ(done[0].result, 8);
	CHECK_EQ(memcmp(buffer(2), "abcdefgh", 8), 0);
	close(pipes[0]);
	close(pipes[1]);
	CHECK_EQ(ember_ring_close(ring), 0);
}

/* The file may not grow past the limit: the write stops short there, its rest says why. */
static void a_short_write_is_continued_to_its_error(int sync)
{
	struct rlimit unlimited, limited;
	ember_ring *ring;
	int fd = scratch(0);

	signal(SIGXFSZ, SIG_IGN);
	CHECK_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
	limited = unlimited;
	limited.rlim_cur = 12288;
	ring = opened(DEPTH);
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limited), 0);
	CHECK_EQ(finish(ring, writing(fd, 0, 16384, 0, sync)), -EFBIG);
	CHECK_EQ(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
	CHECK_EQ(lseek(fd, 0, SEEK_END), 12288);
	close(fd);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void errors_come_back_as_errno(void)
{
	ember_ring *ring = opened(DEPTH);
	int read_only = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int pipes[2];

	CHECK_EQ(pipe(pipes), 0);
	CHECK_EQ(finish(ring, reading(1000000, 0, 512, 0)), -EBADF);
	CHECK_EQ(finish(ring, writing(read_only, 0, 512, 0, 1)), -EBADF);
	CHECK_EQ(finish(ring, syncing(pipes[0])), -EINVAL);
	CHECK_EQ(ember_ring_active(ring), 0);
	close(read_only);
	close(pipes[0]);
	close(pipes[1]);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_senseless_request_takes_nothing_in(void)
{
	ember_ring *ring = opened(2);
	struct ember_ring_request good = reading(0, 0, 512, 0);
	struct ember_ring_request bad[7];
	struct ember_ring_done done[2];

	for (int i = 0; i < 7; i++)
		bad[i] = reading(0, 1, 512, 0);
	bad[0].buffer = BUFFERS;
	bad[1].length = BUFFER_BYTES + 1;
	bad[2].length = 0;
	bad[3].slot = 2;
	bad[4].kind = EMBER_RING_SYNC + 1;
	bad[5].slot = good.slot;
	bad[6].slot = UINT32_MAX;
	for (int i = 0; i < 7; i++) {
		struct ember_ring_request both[2] = { good, bad[i] };

		CHECK_EQ(turn(ring, both, 2, done), -EINVAL);
		CHECK_EQ(ember_ring_active(ring), 0);
	}
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void a_slot_in_flight_is_not_taken_twice(void)
{
	ember_ring *ring = opened(2);
	struct ember_ring_request request;
	struct ember_ring_done done[2];
	int pipes[2];

	CHECK_EQ(pipe(pipes), 0);
	request = reading(pipes[0], 1, 1, 0);
	CHECK_EQ(turn(ring, &request, 1, done), 0);
	CHECK_EQ(turn(ring, &request, 1, done), -EINVAL);
	CHECK_EQ(ember_ring_active(ring), 1);
	CHECK_EQ(write(pipes[1], "x", 1), 1);
	CHECK_EQ(wait_and_turn(ring, done), 1);
	CHECK_EQ(done[0].result, 1);
	close(pipes[0]);
	close(pipes[1]);
	CHECK_EQ(ember_ring_close(ring), 0);
}

/* Full batches over and over: submission entries and completions go round many times. */
static void a_long_run_loses_nothing(void)
{
	ember_ring *ring = opened(DEPTH);
	struct ember_ring_request batch[DEPTH];
	struct ember_ring_done done[DEPTH];
	int fd = scratch(0);
	unsigned over = 0;

	for (unsigned number = 0; number < 2500; number++) {
		int count;

		for (unsigned i = 0; i < DEPTH; i++) {
			batch[i] = writing(fd, i % BUFFERS, 512, i * 512, 0);
			batch[i].slot = i;
			if (i % 2)
				batch[i].kind = EMBER_RING_READ;
		}
		count = turn(ring, batch, DEPTH, done);
		for (;;) {
			for (int i = 0; i < count; i++)
				CHECK(done[i].result == 512 || done[i].slot % 2);
			over += (unsigned)count;
			if (!ember_ring_active(ring))
				break;
			count = wait_and_turn(ring, done);
		}
	}
	CHECK_EQ(over, 2500 * DEPTH);
	close(fd);
	CHECK_EQ(ember_ring_close(ring), 0);
}

/* CAP_IPC_LOCK lifts RLIMIT_MEMLOCK; take it out of, or put it back into, what is effective. */
static void set_ipc_lock(int effective)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct sets[2];
	const unsigned bit = 1u << CAP_IPC_LOCK;

	CHECK_EQ(syscall(SYS_capget, &header, sets), 0);
	if (!(sets[0].permitted & bit))
		return;
	sets[0].effective = effective ? sets[0].effective | bit : sets[0].effective & ~bit;
	CHECK_EQ(syscall(SYS_capset, &header, sets), 0);
}

/* The limit has room for the ring itself, not for the arena: the requests go through unpinned. */
static void a_ring_that_may_not_pin_works_unpinned(void)
{
	struct rlimit before, little;
	ember_ring *ring;
	int fd = scratch(0);

	CHECK_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
	little = before;
	little.rlim_cur = BUFFER_BYTES;
	set_ipc_lock(0);
	CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &little), 0);
	ring = opened(DEPTH);
	CHECK_EQ(ember_ring_registered(ring), 0);
	fill(0, 9);
	CHECK_EQ(finish(ring, writing(fd, 0, 4096, 0, 1)), 4096);
	CHECK_EQ(finish(ring, reading(fd, 1, 4096, 0)), 4096);
	CHECK_EQ(memcmp(buffer(0), buffer(1), 4096), 0);
	CHECK_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
	set_ipc_lock(1);
	close(fd);
	CHECK_EQ(ember_ring_close(ring), 0);
}

static void senseless_sizes_are_refused(void)
{
	ember_ring *ring = (ember_ring *)arena;

	CHECK_EQ(ember_ring_open(0, arena, BUFFERS, BUFFER_BYTES, &ring), -EINVAL);
	CHECK(ring == NULL);
	CHECK_EQ(ember_ring_open(5000, arena, BUFFERS, BUFFER_BYTES, &ring), -EINVAL);
	CHECK_EQ(ember_ring_open(8, NULL, BUFFERS, BUFFER_BYTES, &ring), -EINVAL);
	CHECK_EQ(ember_ring_open(8, arena, 0, BUFFER_BYTES, &ring), -EINVAL);
	CHECK_EQ(ember_ring_open(8, arena, BUFFERS, 0, &ring), -EINVAL);
	CHECK_EQ(ember_ring_close(NULL), 0);
}

int main(void)
{
	int killed_by = -1;
	int allowed = ember_ring_allowed(&killed_by);

	CHECK_EQ(killed_by, 0);
	arena = mmap(NULL, BUFFERS * BUFFER_BYTES, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(arena != MAP_FAILED);
	senseless_sizes_are_refused();
	if (allowed < 0) {
		printf("test_ring: this machine denies io_uring (%s): only the refusal was tested\n",
		       strerror(-allowed));
		return 0;
	}
	what_was_written_is_read_back(0);
	what_was_written_is_read_back(O_DIRECT);
	a_read_ends_at_the_end_of_the_file(0);
	a_read_ends_at_the_end_of_the_file(O_DIRECT);
	a_short_read_is_continued();
	a_short_write_is_continued_to_its_error(0);
	a_short_write_is_continued_to_its_error(1);
	errors_come_back_as_errno();
	a_senseless_request_takes_nothing_in();
	a_slot_in_flight_is_not_taken_twice();
	a_long_run_loses_nothing();
	a_ring_that_may_not_pin_works_unpinned();
	CHECK_EQ(munmap(arena, BUFFERS * BUFFER_BYTES), 0);
	return 0;
}
