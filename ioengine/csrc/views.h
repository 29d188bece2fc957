/*
 * The guard thread's table of views: which inode has which chunks. Private to guard.c and views.c.
 * Registration is rare and reads are short, so one mutex does: whoever has removed a view knows
 * that nobody looks at its bitmap any more.
 */
#ifndef EMBER_VIEWS_H
#define EMBER_VIEWS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct view;

struct views {
	pthread_mutex_t lock;
	struct view *sorted; /* by inode */
	size_t count;
	size_t capacity;
	uint64_t ahead_most; /* bytes: how far ahead of a reader is looked; 0: not at all */
};

enum view_answer { VIEW_UNKNOWN, VIEW_MISSING, VIEW_READABLE };

/* What a read tells of its reader. */
struct reading {
	uint64_t ahead_offset; /* from here on it will read too, and something is missing */
	uint64_t ahead_length; /* 0: it reads in no order, nothing is missing, or it was said before */
	uint32_t again;        /* 0 to 255: how many of this view's readers read on, of late */
};

int views_init(struct views *views);
void views_free(struct views *views);
int views_add(struct views *views, uint64_t inode, const uint8_t *bitmap, size_t bitmap_bytes,
	      uint32_t chunk_bytes, uint64_t length);
int views_remove(struct views *views, uint64_t inode);
void views_read_ahead(struct views *views, uint64_t most_bytes);
/*
 * Are all chunks of [offset, offset + *length) readable? *length is cut at the view's end, where
 * there is nothing but the file's own end to read. reading: of an unknown view all zeros.
 */
enum view_answer views_check(struct views *views, uint64_t inode, uint64_t offset,
			     uint64_t *length, struct reading *reading);

#endif
