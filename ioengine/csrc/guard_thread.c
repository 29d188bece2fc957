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
#include <unistd.h>

#define BATCH_EVENTS 256 /* taken between two looks at the stop flag */
#define RECHECK_MS 100   /* how soon the thread looks again when it could not take an event */

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

static void handle(ember_guard *guard, uint32_t entry)
{
	struct reading reading = { 0 };
	struct journal_event event = journal_event(&guard->journal, entry);
	enum view_answer answer = VIEW_UNKNOWN;
	struct stat st;

	pthread_mutex_lock(&guard->lock);
	guard->counts.events++;
	guard->counts.outstanding++;
	guard->entries[entry].state = ENTRY_ANSWERING;
	pthread_mutex_unlock(&guard->lock);
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
	if (answer == VIEW_READABLE && guard_finish(guard, entry, 0) == 0) {
		pthread_mutex_lock(&guard->lock);
		guard->counts.allowed++;
		pthread_mutex_unlock(&guard->lock);
		if (reading.ahead_length)
			guard_ahead(guard, st.st_ino, &reading);
		return;
	}
	queue_miss(guard, entry, event.length, answer != VIEW_UNKNOWN, &reading);
}

/*
 * Would the next event get a descriptor below the reserve? Numbers are given out from the lowest
 * free one, so while events wait and none came near the limit, the next will not either. Else only
 * a look tells: others may have opened many, or a low number is free with all above it taken.
 */
static bool descriptor_left(ember_guard *guard, bool idle)
{
	struct rlimit limit;
	int lowest;

	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return true;
	if (!idle && (uint64_t)guard->top + guard->reserve < limit.rlim_cur)
		return true;
	lowest = fcntl(guard->wake, F_DUPFD_CLOEXEC, 0);
	if (lowest < 0)
		return false;
	close(lowest);
	if (idle)
		guard->top = lowest;
	return (uint64_t)lowest + guard->reserve < limit.rlim_cur;
}

/* Is there a descriptor and a slot for one more event? Without one, read(2) would deny it. */
static bool room(ember_guard *guard, uint32_t *slot)
{
	bool enough, idle;

	pthread_mutex_lock(&guard->lock);
	idle = guard->counts.outstanding == 0;
	pthread_mutex_unlock(&guard->lock);
	enough = descriptor_left(guard, idle);
	pthread_mutex_lock(&guard->lock);
	enough = enough && guard->free_count > 0;
	if (enough)
		*slot = guard->free_slots[--guard->free_count];
	else if (!guard->paused)
		guard->counts.pauses++;
	guard->paused = !enough;
	pthread_mutex_unlock(&guard->lock);
	return enough;
}

/* Takes one read's worth of events and handles them; 0, or -EAGAIN when the group is empty. */
static int take(ember_guard *guard, uint32_t slot)
{
	ssize_t got = read(guard->group, guard->journal.slots[slot].raw, JOURNAL_EVENT_BYTES);
	int error = got < 0 ? errno : 0;
	unsigned int half, alive = 0, events = got > 0 ? journal_events(&guard->journal, slot) : 0;
	bool lives[2] = { false, false };

	for (half = 0; half < events; half++) {
		lives[half] = journal_event(&guard->journal, slot * 2 + half).descriptor >= 0;
		alive += lives[half];
	}
	if (!alive) { /* nothing, or an overflow notice, which has no descriptor */
		journal_reset(&guard->journal, slot);
		pthread_mutex_lock(&guard->lock);
		guard->free_slots[guard->free_count++] = slot;
		if (error && error != EAGAIN && error != EINTR) {
			guard->counts.read_errors++;
			guard->counts.last_error = error;
		}
		pthread_mutex_unlock(&guard->lock);
		return -error;
	}
	for (half = 0; half < events; half++)
		if (lives[half])
			handle(guard, slot * 2 + half);
	return 0;
}

/* 0: go on at once; -EAGAIN: wait for events; else: something is short, look again in a while. */
static int take_batch(ember_guard *guard)
{
	uint32_t slot;
	int i, ret = 0;

	for (i = 0; i < BATCH_EVENTS && !ret; i++) {
		if (!room(guard, &slot))
			return -EMFILE;
		ret = take(guard, slot);
		if (ret == -EINTR)
			ret = 0;
	}
	return ret;
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
		if (ret == -EAGAIN)
			poll(polled, 2, -1);
		else if (ret)
			poll(polled, 1, RECHECK_MS);
		guard_silence(guard->wake);
		ret = take_batch(guard);
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
