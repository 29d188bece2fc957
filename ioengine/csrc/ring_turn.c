/*
 * ring_turn.c: the requests of a ring.
 *
 * Every request has a slot; a slot stays taken until all its completions came, so a number in
 * user_data never names two requests. A short transfer is continued, and a linked fdatasync is
 * repeated with the rest, until the whole request is done or has failed.
 */
#include "ring.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define MAX_TRIES 16	/* of a transfer that the kernel gave back with EINTR, EAGAIN, ECANCELED */
#define SECTOR_BYTES 512u
#define AGAIN INT64_MIN /* the request goes round once more */

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
