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
};

enum view_answer { VIEW_UNKNOWN, VIEW_MISSING, VIEW_READABLE };

int views_init(struct views *views);
void views_free(struct views *views);
int views_add(struct views *views, uint64_t inode, const uint8_t *bitmap, size_t bitmap_bytes,
	      uint32_t chunk_bytes, uint64_t length);
int views_remove(struct views *views, uint64_t inode);
/*
 * Are all chunks of [offset, offset + *length) readable? *length is cut at the view's end, where
 * there is nothing but the file's own end to read.
 */
enum view_answer views_check(struct views *views, uint64_t inode, uint64_t offset,
			     uint64_t *length);

#endif
