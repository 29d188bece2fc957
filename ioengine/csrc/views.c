/*
 * The guard thread's table of views. Bits are read with acquire order, so a chunk whose bit is
 * seen is seen whole. It must not do I/O, nor allocate while an event is looked up.
 */
#include "views.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct view {
	uint64_t inode;
	uint64_t length;
	const uint8_t *bitmap;
	uint32_t chunk_bytes;
};

int views_init(struct views *views)
{
	memset(views, 0, sizeof(*views));
	return -pthread_mutex_init(&views->lock, NULL);
}

void views_free(struct views *views)
{
	free(views->sorted);
	pthread_mutex_destroy(&views->lock);
	memset(views, 0, sizeof(*views));
}

/* The place of the inode in the table, or where it belongs. */
static size_t place(const struct views *views, uint64_t inode)
{
	size_t low = 0, high = views->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (views->sorted[middle].inode < inode)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool holds(const struct views *views, size_t at, uint64_t inode)
{
	return at < views->count && views->sorted[at].inode == inode;
}

static int grow(struct views *views)
{
	size_t capacity = views->capacity ? views->capacity * 2 : 64;
	struct view *larger;

	if (views->count < views->capacity)
		return 0;
	larger = realloc(views->sorted, capacity * sizeof(*larger));
	if (!larger)
		return -ENOMEM;
	views->sorted = larger;
	views->capacity = capacity;
	return 0;
}

int views_add(struct views *views, uint64_t inode, const uint8_t *bitmap, size_t bitmap_bytes,
	      uint32_t chunk_bytes, uint64_t length)
{
	struct view view = { inode, length, bitmap, chunk_bytes };
	uint64_t chunks;
	size_t at;
	int ret = 0;

	if (inode == 0 || chunk_bytes == 0)
		return -EINVAL;
	chunks = length / chunk_bytes + (length % chunk_bytes != 0);
	if (chunks > (uint64_t)bitmap_bytes * 8 || (chunks && !bitmap))
		return -EINVAL;
	pthread_mutex_lock(&views->lock);
	at = place(views, inode);
	if (!holds(views, at, inode)) {
		ret = grow(views);
		if (ret)
			goto out;
		memmove(&views->sorted[at + 1], &views->sorted[at],
			(views->count - at) * sizeof(view));
		views->count++;
	}
	views->sorted[at] = view;
out:
	pthread_mutex_unlock(&views->lock);
	return ret;
}

int views_remove(struct views *views, uint64_t inode)
{
	int ret = -ENOENT;
	size_t at;

	pthread_mutex_lock(&views->lock);
	at = place(views, inode);
	if (holds(views, at, inode)) {
		views->count--;
		memmove(&views->sorted[at], &views->sorted[at + 1],
			(views->count - at) * sizeof(*views->sorted));
		ret = 0;
	}
	pthread_mutex_unlock(&views->lock);
	return ret;
}

static bool all_set(const uint8_t *bitmap, uint64_t first, uint64_t last)
{
	uint64_t n;

	for (n = first; n <= last; n++) {
		uint8_t byte = __atomic_load_n(&bitmap[n / 8], __ATOMIC_ACQUIRE);

		if (n % 8 == 0 && last - n >= 7) {
			if (byte != 0xff)
				return false;
			n += 7;
		} else if (!(byte & (1u << (n % 8)))) {
			return false;
		}
	}
	return true;
}

enum view_answer views_check(struct views *views, uint64_t inode, uint64_t offset,
			     uint64_t *length)
{
	enum view_answer answer = VIEW_UNKNOWN;
	const struct view *view;
	size_t at;

	pthread_mutex_lock(&views->lock);
	at = place(views, inode);
	if (!holds(views, at, inode))
		goto out;
	view = &views->sorted[at];
	if (offset >= view->length)
		*length = 0;
	else if (*length > view->length - offset)
		*length = view->length - offset;
	answer = VIEW_READABLE;
	if (*length && !all_set(view->bitmap, offset / view->chunk_bytes,
				(offset + *length - 1) / view->chunk_bytes))
		answer = VIEW_MISSING;
out:
	pthread_mutex_unlock(&views->lock);
	return answer;
}
