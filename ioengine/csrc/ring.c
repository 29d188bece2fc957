/*
 * ring.c: an io_uring ring over one arena of equal buffers.
 *
 * Every request has a slot; a slot stays taken until all its completions came, so a number in
 * user_data never names two requests. The submission queue has room for every slot's two entries
 * and the completion queue for twice that: neither can run over. A short transfer is continued,
 * and a linked fdatasync is repeated with the rest, until the whole request is done or has failed.
 */
#include "ember_io.h"

#include <errno.h>
#include <liburing.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_DEPTH 4096u
#define MAX_TRIES 16	/* of a transfer that the kernel gave back with EINTR, EAGAIN, ECANCELED */
#define SECTOR_BYTES 512u
#define AGAIN INT64_MIN /* the request goes round once more */

struct slot {
	struct ember_ring_request asked;
	uint32_t done;	  /* bytes moved so far */
	uint32_t sq_end;  /* submission tail behind this round's entries */
	int32_t moved;	  /* this round's result of the transfer */
	int32_t synced;	  /* this round's result of the fdatasync */
	uint8_t active;
	uint8_t entries;  /* of this round */
	uint8_t waiting;  /* completions still to come */
	uint8_t transfer; /* this round moves bytes */
	uint8_t tries;
};

struct ember_ring {
	struct io_uring uring;
	struct slot *slots;
	uint8_t *arena;
	unsigned depth;
	unsigned active;
	unsigned buffers;
	unsigned buffer_bytes;
	int event;
	int registered;
	int dead;	/* -errno of the submission that the kernel refused for good */
};

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

/* Give the entry just prepared its slot's number and count it in. */
static void enter(struct ember_ring *ring, struct slot *slot, struct io_uring_sqe *entry,
		  unsigned is_sync)
{
	uint64_t number = (uint64_t)(slot - ring->slots);

	io_uring_sqe_set_data64(entry, number << 1 | is_sync);
	slot->entries++;
	slot->waiting++;
	slot->sq_end = ring->uring.sq.sqe_tail;
}

static void queue_transfer(struct ember_ring *ring, struct slot *slot)
{
	const struct ember_ring_request *asked = &slot->asked;
	struct io_uring_sqe *entry = io_uring_get_sqe(&ring->uring);
	uint8_t *start = ring->arena + (size_t)asked->buffer * ring->buffer_bytes + slot->done;
	unsigned length = asked->length - slot->done;
	uint64_t offset = asked->offset + slot->done;
	int number = (int)asked->buffer;

	if (asked->kind == EMBER_RING_READ && ring->registered)
		io_uring_prep_read_fixed(entry, asked->fd, start, length, offset, number);
	else if (asked->kind == EMBER_RING_READ)
		io_uring_prep_read(entry, asked->fd, start, length, offset);
	else if (ring->registered)
		io_uring_prep_write_fixed(entry, asked->fd, start, length, offset, number);
	else
		io_uring_prep_write(entry, asked->fd, start, length, offset);
	if (asked->sync)
		io_uring_sqe_set_flags(entry, IOSQE_IO_LINK);
	enter(ring, slot, entry, 0);
}

static void queue_sync(struct ember_ring *ring, struct slot *slot)
{
	struct io_uring_sqe *entry = io_uring_get_sqe(&ring->uring);

	io_uring_prep_fsync(entry, slot->asked.fd, IORING_FSYNC_DATASYNC);
	enter(ring, slot, entry, 1);
}

/* One round of a request. get_sqe can't fail: the queue holds two entries for every slot. */
static void queue_round(struct ember_ring *ring, struct slot *slot)
{
	slot->entries = 0;
	slot->waiting = 0;
	slot->transfer = slot->asked.kind != EMBER_RING_SYNC && slot->done < slot->asked.length;
	slot->moved = ring->dead;
	slot->synced = ring->dead;
	if (ring->dead)
		return;
	if (slot->transfer)
		queue_transfer(ring, slot);
	if (slot->asked.sync)
		queue_sync(ring, slot);
}

static int sensible(const struct ember_ring *ring, const struct ember_ring_request *asked)
{
	if (asked->slot >= ring->depth || ring->slots[asked->slot].active)
		return 0;
	if (asked->kind == EMBER_RING_SYNC)
		return 1;
	return asked->kind <= EMBER_RING_WRITE && asked->buffer < ring->buffers &&
	       asked->length > 0 && asked->length <= ring->buffer_bytes;
}

static void take_in(struct ember_ring *ring, const struct ember_ring_request *asked)
{
	struct slot *slot = &ring->slots[asked->slot];

	memset(slot, 0, sizeof(*slot));
	slot->asked = *asked;
	slot->asked.sync = asked->kind == EMBER_RING_SYNC ||
			   (asked->kind == EMBER_RING_WRITE && asked->sync);
	slot->active = 1;
	ring->active++;
	queue_round(ring, slot);
}

/*
 * The kernel took the first entries and refuses the rest for good: their requests fail with that
 * error, and nothing is submitted any more.
 */
static void die(struct ember_ring *ring, int error)
{
	uint32_t head = *ring->uring.sq.khead;

	ring->dead = error;
	for (uint32_t i = 0; i < ring->depth; i++) {
		struct slot *slot = &ring->slots[i];
		int32_t refused = (int32_t)(slot->sq_end - head);

		if (!slot->active || refused <= 0)
			continue;
		if (refused > slot->entries)
			refused = slot->entries;
		slot->waiting = (uint8_t)(slot->waiting - refused);
		if (slot->asked.sync)
			slot->synced = error;
		if (slot->transfer && refused == slot->entries)
			slot->moved = error;
	}
}

/* Hand what is queued to the kernel. Returns 1 if it has no room now: try again later. */
static int submit(struct ember_ring *ring)
{
	while (!ring->dead && io_uring_sq_ready(&ring->uring)) {
		int taken = io_uring_submit(&ring->uring);

		if (taken == -EINTR)
			continue;
		if (taken == 0 || taken == -EAGAIN || taken == -EBUSY || taken == -ENOMEM)
			return 1;
		if (taken < 0)
			die(ring, taken);
	}
	return 0;
}

static int passing(int32_t error)
{
	return error == -EINTR || error == -EAGAIN || error == -ECANCELED;
}

/* A round is over: the request's result, or AGAIN. */
static int64_t judge(struct slot *slot)
{
	if (slot->transfer) {
		if (passing(slot->moved))
			return ++slot->tries < MAX_TRIES ? AGAIN : slot->moved;
		/* A direct read that stopped off a sector met the end of the file: no more to ask. */
		if (slot->moved == -EINVAL && slot->asked.kind == EMBER_RING_READ &&
		    slot->done % SECTOR_BYTES)
			return slot->done;
		if (slot->moved < 0)
			return slot->moved;
		if (slot->moved == 0)
			return slot->asked.kind == EMBER_RING_READ ? (int64_t)slot->done : -EIO;
		slot->done += (uint32_t)slot->moved;
		if (slot->done < slot->asked.length) {
			slot->tries = 0;
			return AGAIN;
		}
	}
	if (slot->asked.sync && passing(slot->synced))
		return ++slot->tries < MAX_TRIES ? AGAIN : slot->synced;
	if (slot->asked.sync && slot->synced < 0)
		return slot->synced;
	return slot->done;
}

/* Returns 1 and fills `out` if the request is over, 0 if it was queued once more. */
static unsigned conclude(struct ember_ring *ring, uint32_t number, struct ember_ring_done *out)
{
	struct slot *slot = &ring->slots[number];
	int64_t result = judge(slot);

	if (result == AGAIN && !ring->dead) {
		queue_round(ring, slot);
		return 0;
	}
	out->slot = number;
	out->result = result == AGAIN ? ring->dead : result;
	slot->active = 0;
	ring->active--;
	return 1;
}

static unsigned collect(struct ember_ring *ring, struct ember_ring_done *out)
{
	struct io_uring_cqe *entry;
	unsigned count = 0;

	while (io_uring_peek_cqe(&ring->uring, &entry) == 0) {
		uint64_t data = io_uring_cqe_get_data64(entry);
		uint32_t number = (uint32_t)(data >> 1);
		struct slot *slot = &ring->slots[number];

		if (data & 1)
			slot->synced = entry->res;
		else
			slot->moved = entry->res;
		io_uring_cqe_seen(&ring->uring, entry);
		if (--slot->waiting == 0)
			count += conclude(ring, number, out + count);
	}
	return count;
}

/* The requests of a dead ring for which no completion will come. */
static unsigned collect_refused(struct ember_ring *ring, struct ember_ring_done *out)
{
	unsigned count = 0;

	for (uint32_t i = 0; ring->dead && i < ring->depth; i++)
		if (ring->slots[i].active && ring->slots[i].waiting == 0)
			count += conclude(ring, i, out + count);
	return count;
}

/*
 * Take in `count` requests, submit, and write what is over to `out`, which has room for `depth`.
 * Returns how many are over. *postponed becomes 1 if the kernel had no room for all of them: turn
 * again soon, with or without new requests. -EINVAL: a request makes no sense (slot in use, buffer
 * or length out of range); then none was taken.
 */
int ember_ring_turn(ember_ring *ring, const struct ember_ring_request *requests, unsigned count,
		    struct ember_ring_done *out, int *postponed)
{
	unsigned over;
	uint64_t rings;
	ssize_t taken;

	*postponed = 0;
	for (unsigned i = 0; i < count; i++) {
		if (!sensible(ring, &requests[i])) {
			while (i-- > 0)
				ring->slots[requests[i].slot].active = 0;
			return -EINVAL;
		}
		ring->slots[requests[i].slot].active = 1; /* so a second of it is senseless */
	}
	for (unsigned i = 0; i < count; i++)
		take_in(ring, &requests[i]);
	*postponed = submit(ring);
	/* The event is taken back before the completions are: what comes later rings again. */
	taken = read(ring->event, &rings, sizeof(rings)); /* EAGAIN: nobody rang */
	(void)taken;
	over = collect(ring, out);
	if (!*postponed)
		*postponed = submit(ring); /* what was short goes on */
	return (int)(over + collect_refused(ring, out + over));
}
