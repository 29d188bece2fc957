/*
 * Answers: of one event or of many in one call, by the guard's thread or by its owner, who has
 * brought what was missing.
 *
 * Invariants: an event is answered once; its descriptor stays open until its journal entry is
 * cleared, so no two live entries share a number.
 */
#include "guard.h"

#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fanotify_abi.h"

#define ANSWERS 64 /* given in one call */

/* The number of an orphan that is settled, or left to a successor, may be given out again. */
void guard_release(ember_guard *guard, uint32_t entry, int descriptor)
{
	if (guard->entries[entry].reserved)
		close(descriptor);
	else
		guard->unreserved--;
	guard->entries[entry].reserved = false;
}

static int respond(const ember_guard *guard, int descriptor, int error)
{
	struct fanotify_response response = {
		.fd = descriptor,
		.response = ember_response(error),
	};

	if (write(guard->group, &response, sizeof(response)) >= 0)
		return 0;
	return -errno;
}

/* Under the lock. The slot goes back to the list when none of its events is alive. */
static void forget(ember_guard *guard, uint32_t entry)
{
	guard->entries[entry].state = ENTRY_FREE;
	guard->entries[entry].generation++;
	if (journal_clear(&guard->journal, entry))
		guard->free_slots[guard->free_count++] = entry / 2;
	if (guard->paused)
		guard_ring(guard->wake);
}

int guard_finish(ember_guard *guard, uint32_t entry, int error)
{
	int descriptor = journal_event(&guard->journal, entry).descriptor;
	int ret = respond(guard, descriptor, error);

	pthread_mutex_lock(&guard->lock);
	/* ENOENT: the kernel has no such event any more, so nobody waits for the answer. */
	if (ret && ret != -ENOENT) {
		guard->entries[entry].state = ENTRY_WAITING;
		pthread_mutex_unlock(&guard->lock);
		return ret;
	}
	forget(guard, entry);
	guard->counts.outstanding--;
	if (error)
		guard->counts.denied++;
	pthread_mutex_unlock(&guard->lock);
	close(descriptor);
	return 0;
}

unsigned int guard_allow(ember_guard *guard, const uint32_t *entries, unsigned int count)
{
	struct fanotify_response responses[ANSWERS];
	struct iovec parts[ANSWERS];
	unsigned int i, done;
	ssize_t written;

	if (count > ANSWERS)
		count = ANSWERS;
	for (i = 0; i < count; i++) {
		responses[i].fd = journal_event(&guard->journal, entries[i]).descriptor;
		responses[i].response = FAN_ALLOW;
		parts[i].iov_base = &responses[i];
		parts[i].iov_len = sizeof(responses[i]);
	}
	/* The kernel takes one answer at a time, also of many in a call, and stops at a false one. */
	written = writev(guard->group, parts, (int)count);
	done = written > 0 ? (unsigned int)written / (unsigned int)sizeof(*responses) : 0;
	pthread_mutex_lock(&guard->lock);
	for (i = 0; i < done; i++)
		forget(guard, entries[i]);
	guard->counts.outstanding -= done;
	guard->counts.allowed += done;
	pthread_mutex_unlock(&guard->lock);
	for (i = 0; i < done; i++)
		close(responses[i].fd);
	return done;
}

int ember_guard_settle(ember_guard *guard, uint32_t entry, int error)
{
	int descriptor, ret = -ESTALE;

	if (entry >= guard->journal.count * 2)
		return -EINVAL;
	/* Held over the write: orphans are few. */
	pthread_mutex_lock(&guard->lock);
	if (guard->entries[entry].state != ENTRY_ORPHAN)
		goto out;
	descriptor = journal_event(&guard->journal, entry).descriptor;
	ret = respond(guard, descriptor, error);
	if (ret && ret != -ENOENT)
		goto out;
	ret = 0;
	forget(guard, entry);
	guard_release(guard, entry, descriptor);
	guard->counts.orphans--;
	if (error)
		guard->counts.denied++;
out:
	pthread_mutex_unlock(&guard->lock);
	return ret;
}

int ember_guard_answer(ember_guard *guard, uint64_t token, int error)
{
	uint32_t number = (uint32_t)token;
	struct entry *entry;

	if (number >= guard->journal.count * 2)
		return -EINVAL;
	entry = &guard->entries[number];
	pthread_mutex_lock(&guard->lock);
	if (entry->state != ENTRY_WAITING || entry->generation != (uint32_t)(token >> 32)) {
		pthread_mutex_unlock(&guard->lock);
		return -ESTALE;
	}
	entry->state = ENTRY_ANSWERING;
	pthread_mutex_unlock(&guard->lock);
	return guard_finish(guard, number, error);
}
