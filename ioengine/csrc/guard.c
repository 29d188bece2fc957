/*
 * The guard's life: joining group and journal, marks, orphans, and misses on their way out.
 *
 * Invariant: every event taken from the group stands in the journal until it is answered.
 */
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "fanotify_abi.h"

int ember_guard_group(void)
{
	int fd = fanotify_init(FAN_CLASS_PRE_CONTENT | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS |
				       FAN_CLOEXEC | FAN_NONBLOCK,
			       O_RDONLY | O_LARGEFILE | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

int ember_guard_journal(uint32_t slots)
{
	return journal_create(slots);
}

int ember_guard_mark(int group, const char *path)
{
	unsigned int flags = FAN_MARK_ADD | FAN_MARK_MOUNT;

	return fanotify_mark(group, flags, FAN_PRE_ACCESS, AT_FDCWD, path) < 0 ? -errno : 0;
}

int ember_guard_ignore(ember_guard *guard, int descriptor, int on)
{
	unsigned int flags = FAN_MARK_IGNORE;

	flags |= on ? FAN_MARK_ADD | FAN_MARK_IGNORED_SURV_MODIFY : FAN_MARK_REMOVE;
	return fanotify_mark(guard->group, flags, FAN_PRE_ACCESS, descriptor, NULL) < 0 ? -errno
											: 0;
}

void guard_ring(int eventfd)
{
	uint64_t one = 1;
	/* A full counter is as good as a rung bell, so a failure needs no answer. */
	ssize_t ignored = write(eventfd, &one, sizeof(one));

	(void)ignored;
}

void guard_silence(int eventfd)
{
	uint64_t count;
	ssize_t ignored = read(eventfd, &count, sizeof(count));

	(void)ignored;
}

/*
 * An answer names its event by a number only, and the oldest event of that number gets it. While
 * we hold the number ourselves the kernel gives it to no new event, so that the orphan can wait as
 * long as it must. False if something else has the number here, or if it is beyond the limit.
 */
static bool reserve(const ember_guard *guard, int descriptor)
{
	int got = fcntl(guard->wake, F_DUPFD_CLOEXEC, descriptor);

	if (got >= 0 && got != descriptor)
		close(got);
	return got == descriptor;
}

static void adopt(ember_guard *guard, uint32_t entry, int descriptor)
{
	guard->entries[entry].state = ENTRY_ORPHAN;
	guard->entries[entry].reserved = reserve(guard, descriptor);
	if (!guard->entries[entry].reserved)
		guard->unreserved++;
	guard->counts.orphans++;
}

/* Under the lock: the journal's word on what is taken already. Fills the list of free slots. */
static void find_orphans(ember_guard *guard)
{
	uint32_t slot;
	unsigned int half;

	for (slot = guard->journal.count; slot-- > 0;) {
		unsigned int events = journal_events(&guard->journal, slot), alive = 0;

		for (half = 0; half < events; half++) {
			uint32_t entry = slot * 2 + half;
			int descriptor = journal_event(&guard->journal, entry).descriptor;

			if (descriptor < 0)
				continue;
			adopt(guard, entry, descriptor);
			alive++;
		}
		if (events && !alive)
			journal_clear(&guard->journal, slot * 2);
		if (!alive)
			guard->free_slots[guard->free_count++] = slot;
	}
}

static int allocate(ember_guard *guard)
{
	size_t slots = guard->journal.count;

	guard->entries = calloc(slots * 2, sizeof(*guard->entries));
	guard->free_slots = calloc(slots, sizeof(*guard->free_slots));
	guard->queue = calloc(slots * 2, sizeof(*guard->queue));
	return guard->entries && guard->free_slots && guard->queue ? 0 : -ENOMEM;
}

int ember_guard_open(ember_guard **out, int group, int journal, uint64_t device, uint32_t reserve)
{
	ember_guard *guard = calloc(1, sizeof(*guard));
	int ret;

	*out = NULL;
	if (!guard)
		return -ENOMEM;
	guard->group = group;
	guard->device = device;
	guard->reserve = reserve;
	pthread_mutex_init(&guard->lock, NULL);
	guard->wake = guard->missed = -1;
	ret = views_init(&guard->views);
	if (!ret)
		ret = journal_map(&guard->journal, journal);
	if (!ret)
		ret = allocate(guard);
	if (ret)
		goto out;
	guard->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	guard->missed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (guard->wake < 0 || guard->missed < 0) {
		ret = -errno;
		goto out;
	}
	guard->counts.locked = guard->journal.locked;
	find_orphans(guard);
	*out = guard;
	return 0;
out:
	ember_guard_close(guard);
	return ret;
}

void ember_guard_close(ember_guard *guard)
{
	uint32_t entry;

	if (!guard)
		return;
	ember_guard_stop(guard);
	/* What waits stays in the journal; whoever joins next finds it there as an orphan. */
	for (entry = 0; guard->entries && entry < guard->journal.count * 2; entry++) {
		int descriptor = journal_event(&guard->journal, entry).descriptor;

		if (guard->entries[entry].state == ENTRY_WAITING)
			close(descriptor);
		else if (guard->entries[entry].state == ENTRY_ORPHAN)
			guard_release(guard, entry, descriptor);
	}
	journal_unmap(&guard->journal);
	if (guard->wake >= 0)
		close(guard->wake);
	if (guard->missed >= 0)
		close(guard->missed);
	views_free(&guard->views);
	pthread_mutex_destroy(&guard->lock);
	free(guard->entries);
	free(guard->free_slots);
	free(guard->queue);
	free(guard);
}

int ember_guard_orphans(ember_guard *guard, ember_orphan *out, uint32_t capacity)
{
	uint32_t entry, found = 0;

	pthread_mutex_lock(&guard->lock);
	for (entry = 0; entry < guard->journal.count * 2 && found < capacity; entry++) {
		struct journal_event event;

		if (guard->entries[entry].state != ENTRY_ORPHAN)
			continue;
		event = journal_event(&guard->journal, entry);
		out[found++] = (ember_orphan){
			.inode = guard->journal.slots[entry / 2].inode[entry % 2],
			.offset = event.offset,
			.length = event.length,
			.entry = entry,
			.descriptor = event.descriptor,
			.pid = event.pid,
			.whole = event.whole,
			.reserved = guard->entries[entry].reserved,
		};
	}
	pthread_mutex_unlock(&guard->lock);
	return (int)found;
}

int ember_guard_eventfd(const ember_guard *guard)
{
	return guard->missed;
}

int ember_guard_misses(ember_guard *guard, ember_miss *out, uint32_t capacity)
{
	uint32_t ring = guard->journal.count * 2, found = 0;

	pthread_mutex_lock(&guard->lock);
	while (found < capacity && guard->queue_count > 0) {
		uint32_t number = guard->queue[guard->queue_head];
		const struct entry *entry = &guard->entries[number];
		struct journal_event event = journal_event(&guard->journal, number);

		guard->queue_head = (guard->queue_head + 1) % ring;
		guard->queue_count--;
		out[found++] = (ember_miss){
			.token = (uint64_t)entry->generation << 32 | number,
			.inode = guard->journal.slots[number / 2].inode[number % 2],
			.offset = event.offset,
			.length = entry->length,
			.ahead = entry->ahead,
			.pid = event.pid,
			.known = entry->known,
			.again = entry->again,
		};
	}
	if (guard->queue_count + guard->ahead_count == 0)
		guard_silence(guard->missed);
	pthread_mutex_unlock(&guard->lock);
	return (int)found;
}

int ember_guard_add(ember_guard *guard, uint64_t inode, const uint8_t *bitmap,
		    size_t bitmap_bytes, uint32_t chunk_bytes, uint64_t length)
{
	return views_add(&guard->views, inode, bitmap, bitmap_bytes, chunk_bytes, length);
}

int ember_guard_remove(ember_guard *guard, uint64_t inode)
{
	return views_remove(&guard->views, inode);
}

void ember_guard_count(ember_guard *guard, ember_guard_counts *out)
{
	pthread_mutex_lock(&guard->lock);
	*out = guard->counts;
	pthread_mutex_unlock(&guard->lock);
}
