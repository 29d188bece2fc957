/*
 * What the guard's thread sees coming: ranges that are missing where somebody reads in order. They
 * are hints: nobody waits for them yet, they are few, and the oldest are kept when nobody collects.
 */
#include "guard.h"

void guard_ahead(ember_guard *guard, uint64_t inode, const struct reading *reading)
{
	pthread_mutex_lock(&guard->lock);
	if (guard->ahead_count < AHEADS) {
		guard->aheads[guard->ahead_count++] = (ember_ahead){
			.inode = inode,
			.offset = reading->ahead_offset,
			.length = reading->ahead_length,
		};
		if (guard->ahead_count == 1)
			guard_ring(guard->missed);
	}
	pthread_mutex_unlock(&guard->lock);
}

void ember_guard_read_ahead(ember_guard *guard, uint64_t most_bytes)
{
	views_read_ahead(&guard->views, most_bytes);
}

int ember_guard_aheads(ember_guard *guard, ember_ahead *out, uint32_t capacity)
{
	uint32_t found;

	pthread_mutex_lock(&guard->lock);
	for (found = 0; found < capacity && found < guard->ahead_count; found++)
		out[found] = guard->aheads[found];
	guard->ahead_count = 0;
	if (guard->queue_count == 0)
		guard_silence(guard->missed);
	pthread_mutex_unlock(&guard->lock);
	return (int)found;
}
