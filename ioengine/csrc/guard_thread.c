/*
 * The guard's thread: takes events out of the group into the journal and answers those whose
 * chunks are here; the others become misses. It takes no GIL, touches no file of a guarded mount,
 * allocates nothing, and never reads the group without a slot and a descriptor to spare.
 */
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define ROUND_EVENTS 256 /* taken between two looks at the stop flag */
#define RECHECK_MS 100   /* how soon the thread looks again when it could not take an event */
#define LOOK_NS 8000000  /* so long a look at what descriptors are left is believed */
#define BATCH 32         /* slots that one read of the group fills at most */

/* What one read of the group brought, and which of it is answered with "go on". */
struct batch {
	uint32_t slots[BATCH];
	unsigned int count;
	uint32_t readable[2 * BATCH];
	unsigned int readable_count;
	struct { uint64_t inode; struct reading reading; } ahead[2 * BATCH];
	unsigned int ahead_count;
};

static void queue_miss(ember_guard *guard, uint32_t entry, uint64_t length, bool known,
		       const struct reading *reading)
{
	uint32_t capacity = guard->journal.count * 2;
	struct entry *waiting = &guard->entries[entry];

	pthread_mutex_lock(&guard->lock);
	waiting->state = ENTRY_WAITING;
	waiting->known = known;
	waiting->length = length;
	waiting->ahead = reading->ahead_length;
	waiting->again = (uint8_t)reading->again;
	guard->queue[(guard->queue_head + guard->queue_count++) % capacity] = entry;
	guard->counts.misses++;
	if (guard->queue_count == 1)
		guard_ring(guard->missed);
	pthread_mutex_unlock(&guard->lock);
}

/* Whose chunks are here is noted to be answered with the others; the rest are misses. */
static void look_up(ember_guard *guard, uint32_t entry, struct batch *batch)
{
	struct reading reading = { 0 };
	struct journal_event event = journal_event(&guard->journal, entry);
	enum view_answer answer = VIEW_UNKNOWN;
	struct stat st;

	if (event.descriptor > guard->top)
		guard->top = event.descriptor;
	if (event.strange) {
		guard_finish(guard, entry, EIO);
		return;
	}
	if (fstat(event.descriptor, &st) == 0 && st.st_dev == guard->device) {
		uint64_t size = (uint64_t)st.st_size;

		__atomic_store_n(&guard->journal.slots[entry / 2].inode[entry % 2], st.st_ino,
				 __ATOMIC_RELEASE);
		if (event.whole)
			event.length = size;
		else if (event.offset >= size)
			event.length = 0;
		else if (event.length > size - event.offset)
			event.length = size - event.offset;
		answer = views_check(&guard->views, st.st_ino, event.offset, &event.length,
				     &reading);
	}
	if (answer != VIEW_READABLE) {
		queue_miss(guard, entry, event.length, answer != VIEW_UNKNOWN, &reading);
		return;
	}
	batch->readable[batch->readable_count++] = entry;
	if (reading.ahead_length) {
		batch->ahead[batch->ahead_count].inode = st.st_ino;
		batch->ahead[batch->ahead_count++].reading = reading;
	}
}

/* One that the kernel did not take is tried once more by itself, and then is its owner's. */
static void answer_alone(ember_guard *guard, uint32_t entry)
{
	static const struct reading none;

	if (guard_finish(guard, entry, 0) == 0) {
		pthread_mutex_lock(&guard->lock);
		guard->counts.allowed++;
		pthread_mutex_unlock(&guard->lock);
		return;
	}
	queue_miss(guard, entry, journal_event(&guard->journal, entry).length, true, &none);
}

static void answer_readable(ember_guard *guard, const struct batch *batch)
{
	unsigned int from = 0, i;

	while (from < batch->readable_count) {
		const uint32_t *entries = batch->readable + from;
		unsigned int count = batch->readable_count - from;
		unsigned int done = guard_allow(guard, entries, count);

		from += done;
		if (done < count)
			answer_alone(guard, batch->readable[from++]);
	}
	for (i = 0; i < batch->ahead_count; i++)
		guard_ahead(guard, batch->ahead[i].inode, &batch->ahead[i].reading);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/*
 * How many of the next events would get descriptors below the reserve, of those wanted? Numbers are
 * given out from the lowest free one, so while events wait and none came near the limit, the next
 * will not either. Else only a look tells, and of one: others may have opened many, or a low number
 * is free with all above it taken. A look is believed for a few milliseconds: what others open
 * meanwhile the reserve is for.
 */
static unsigned int descriptors_left(ember_guard *guard, bool idle, unsigned int wanted)
{
	uint64_t now = now_ns();
	bool fresh = now - guard->looked_ns < LOOK_NS;
	struct rlimit limit;
	int lowest;

	if (!fresh) {
		if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
			return 1;
		guard->limit = limit.rlim_cur;
	}
	if ((fresh || !idle) && (uint64_t)guard->top + guard->reserve + wanted <= guard->limit)
		return wanted;
	lowest = fcntl(guard->wake, F_DUPFD_CLOEXEC, 0);
	if (lowest < 0)
		return 0;
	close(lowest);
	guard->looked_ns = now;
	if (idle)
		guard->top = lowest;
	return (uint64_t)lowest + guard->reserve < guard->limit;
}

/* Takes free slots for the next events: fewer than wanted, or none, where something is short. */
static void room(ember_guard *guard, unsigned int wanted, struct batch *batch)
{
	bool idle;

	pthread_mutex_lock(&guard->lock);
	idle = guard->counts.outstanding == 0;
	pthread_mutex_unlock(&guard->lock);
	wanted = descriptors_left(guard, idle, wanted);
	batch->count = 0;
	pthread_mutex_lock(&guard->lock);
	while (batch->count < wanted && guard->free_count > 0)
		batch->slots[batch->count++] = guard->free_slots[--guard->free_count];
	if (!batch->count && !guard->paused)
		guard->counts.pauses++;
	guard->paused = !batch->count;
	pthread_mutex_unlock(&guard->lock);
}

/*
 * One read of the group for each slot, in one system call: the kernel fills them one after the
 * other, each event put down by the very act of taking it, and stops where the group is empty.
 */
static ssize_t fill(ember_guard *guard, const struct batch *batch)
{
	struct iovec parts[BATCH];
	unsigned int i;

	for (i = 0; i < batch->count; i++) {
		parts[i].iov_base = guard->journal.slots[batch->slots[i]].raw;
		parts[i].iov_len = JOURNAL_EVENT_BYTES;
	}
	return readv(guard->group, parts, (int)batch->count);
}

/* The entries of the batch that are alive; slots without one go back to the list. */
static unsigned int sort_out(ember_guard *guard, const struct batch *batch, uint32_t *alive)
{
	unsigned int i, half, found = 0;

	pthread_mutex_lock(&guard->lock);
	for (i = batch->count; i-- > 0;) {
		uint32_t slot = batch->slots[i];
		unsigned int events = journal_events(&guard->journal, slot), before = found;

		for (half = 0; half < events; half++) {
			uint32_t entry = slot * 2 + half;

			if (journal_event(&guard->journal, entry).descriptor < 0)
				continue; /* an overflow notice, which has no descriptor */
			guard->entries[entry].state = ENTRY_ANSWERING;
			alive[found++] = entry;
		}
		if (found == before) {
			if (events)
				journal_reset(&guard->journal, slot);
			guard->free_slots[guard->free_count++] = slot;
		}
	}
	guard->counts.events += found;
	guard->counts.outstanding += found;
	pthread_mutex_unlock(&guard->lock);
	return found;
}

/* Takes what one read brings and deals with it; how much, or -EAGAIN when the group is empty. */
static int take(ember_guard *guard, struct batch *batch)
{
	uint32_t alive[2 * BATCH];
	ssize_t got = fill(guard, batch);
	int error = got < 0 ? errno : 0;
	unsigned int found = sort_out(guard, batch, alive), i;

	if (!found) {
		if (error && error != EAGAIN && error != EINTR) {
			pthread_mutex_lock(&guard->lock);
			guard->counts.read_errors++;
			guard->counts.last_error = error;
			pthread_mutex_unlock(&guard->lock);
		}
		return -error;
	}
	batch->readable_count = batch->ahead_count = 0;
	for (i = found; i-- > 0;) /* in the order in which they came */
		look_up(guard, alive[i], batch);
	answer_readable(guard, batch);
	return (int)found;
}

/* 0: go on at once; -EAGAIN: wait for events; else: something is short, look again in a while. */
static int take_round(ember_guard *guard)
{
	unsigned int wanted = 1;
	int taken = 0, ret;
	struct batch batch;

	/* A lone reader is answered after a small read; who comes in crowds is taken in crowds. */
	while (taken < ROUND_EVENTS) {
		room(guard, wanted, &batch);
		if (!batch.count)
			return -EMFILE;
		ret = take(guard, &batch);
		if (ret == -EINTR || ret == 0)
			continue;
		if (ret < 0)
			return ret;
		if (wanted > 1 && (unsigned int)ret < batch.count)
			return -EAGAIN; /* emptied */
		taken += ret;
		wanted = wanted * 2 < BATCH ? wanted * 2 : BATCH;
	}
	return 0;
}

static bool must_stop(ember_guard *guard)
{
	bool stopping;

	pthread_mutex_lock(&guard->lock);
	stopping = guard->stopping;
	pthread_mutex_unlock(&guard->lock);
	return stopping;
}

static void *run(void *argument)
{
	ember_guard *guard = argument;
	struct pollfd polled[2] = {
		{ .fd = guard->wake, .events = POLLIN },
		{ .fd = guard->group, .events = POLLIN },
	};
	int ret = 0;

	while (!must_stop(guard)) {
		polled[0].revents = 0;
		if (ret == -EAGAIN)
			poll(polled, 2, -1);
		else if (ret)
			poll(polled, 1, RECHECK_MS);
		if (polled[0].revents)
			guard_silence(guard->wake);
		ret = take_round(guard);
	}
	return NULL;
}

int ember_guard_start(ember_guard *guard)
{
	sigset_t all, before;
	int ret = 0;

	pthread_mutex_lock(&guard->lock);
	if (guard->running)
		ret = -EALREADY;
	else if (guard->unreserved)
		ret = -EBUSY;
	if (ret)
		goto out;
	guard->stopping = false;
	/* Signals belong to the process's own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = -pthread_create(&guard->thread, NULL, run, guard);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	guard->running = ret == 0;
	if (guard->running)
		pthread_setname_np(guard->thread, "ember-guard");
out:
	pthread_mutex_unlock(&guard->lock);
	return ret;
}

int ember_guard_stop(ember_guard *guard)
{
	bool running;

	pthread_mutex_lock(&guard->lock);
	running = guard->running;
	guard->running = false;
	guard->stopping = true;
	pthread_mutex_unlock(&guard->lock);
	if (!running)
		return 0;
	guard_ring(guard->wake);
	return -pthread_join(guard->thread, NULL);
}
