/*
 * The guard thread's table of views. Bits are read with acquire order, so a chunk whose bit is
 * seen is seen whole. It must not do I/O, nor allocate while an event is looked up.
 */
#include "views.h"

#include "streams.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct view {
	uint64_t inode;
	uint64_t length;
	const uint8_t *bitmap;
	uint32_t chunk_bytes;
	struct streams *streams;
};

/* A reader that has come this far in order will read on: twice as far again, as a guess. */
#define IN_ORDER_BYTES (64 * 1024)
#define AHEAD_FACTOR 2

int views_init(struct views *views)
{
	memset(views, 0, sizeof(*views));
	return -pthread_mutex_init(&views->lock, NULL);
}

void views_free(struct views *views)
{
	for (size_t i = 0; i < views->count; i++)
		free(views->sorted[i].streams);
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
	struct view view = { inode, length, bitmap, chunk_bytes, NULL };
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
	if (holds(views, at, inode)) {
		view.streams = views->sorted[at].streams;
	} else {
		ret = grow(views);
		if (!ret) {
			view.streams = malloc(sizeof(*view.streams));
			ret = view.streams ? 0 : -ENOMEM;
		}
		if (ret)
			goto out;
		streams_init(view.streams);
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
		free(views->sorted[at].streams);
		views->count--;
		memmove(&views->sorted[at], &views->sorted[at + 1],
			(views->count - at) * sizeof(*views->sorted));
		ret = 0;
	}
	pthread_mutex_unlock(&views->lock);
	return ret;
}

/* Chunks first to last: whole words where there are some, bytes of which only some bits count. */
static bool all_set(const uint8_t *bitmap, uint64_t first, uint64_t last)
{
	bool aligned = (uintptr_t)bitmap % sizeof(uint64_t) == 0;
	uint64_t n = first;

	while (n <= last) {
		uint64_t left = last - n + 1;
		unsigned int low = n % 8, bits = left < 8 - low ? (unsigned int)left : 8 - low;
		uint8_t mask = (uint8_t)(((1u << bits) - 1) << low);

		if (aligned && n % 64 == 0 && left >= 64) {
			const uint64_t *word = (const void *)(bitmap + n / 8);

			if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != UINT64_MAX)
				return false;
			n += 64;
			continue;
		}
		if ((__atomic_load_n(&bitmap[n / 8], __ATOMIC_ACQUIRE) & mask) != mask)
			return false;
		n += bits;
	}
	return true;
}

void views_read_ahead(struct views *views, uint64_t most_bytes)
{
	pthread_mutex_lock(&views->lock);
	views->ahead_most = most_bytes;
	pthread_mutex_unlock(&views->lock);
}

/*
 * Will a reader that reads in order come to something that is missing? It is said when half of what
 * lies ahead of it is used up, so that the rest is on its way before the reader is there.
 */
static void look_ahead(const struct view *view, uint64_t most, struct stream *stream,
		       enum view_answer answer, struct reading *reading)
{
	uint64_t left = stream->end < view->length ? view->length - stream->end : 0;
	uint64_t window = stream->run * AHEAD_FACTOR;

	if (window > most)
		window = most;
	if (window > left)
		window = left;
	if (stream->run < IN_ORDER_BYTES || !window)
		return;
	/* Who misses something has to be told of all that comes with it. */
	if (answer == VIEW_READABLE &&
	    (stream->end + window / 2 < stream->ahead ||
	     all_set(view->bitmap, stream->end / view->chunk_bytes,
		     (stream->end + window / 2) / view->chunk_bytes)))
		return;
	stream->ahead = stream->end + window;
	reading->ahead_offset = stream->end;
	reading->ahead_length = window;
}

enum view_answer views_check(struct views *views, uint64_t inode, uint64_t offset,
			     uint64_t *length, struct reading *reading)
{
	enum view_answer answer = VIEW_UNKNOWN;
	const struct view *view;
	struct stream *stream;
	size_t at;

	*reading = (struct reading){ 0 };
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
	if (!*length)
		goto out;
	if (!all_set(view->bitmap, offset / view->chunk_bytes,
		     (offset + *length - 1) / view->chunk_bytes))
		answer = VIEW_MISSING;
	stream = streams_note(view->streams, offset, *length, view->chunk_bytes);
	reading->again = view->streams->again;
	look_ahead(view, views->ahead_most, stream, answer, reading);
out:
	pthread_mutex_unlock(&views->lock);
	return answer;
}
