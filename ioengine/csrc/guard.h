/*
 * What guard.c (life, answers) and guard_thread.c (the thread that takes events) share.
 */
#ifndef EMBER_GUARD_H
#define EMBER_GUARD_H

#include <pthread.h>
#include <stdbool.h>

#include "ember_io.h"
#include "journal.h"
#include "views.h"

enum entry_state { ENTRY_FREE, ENTRY_WAITING, ENTRY_ANSWERING, ENTRY_ORPHAN };

struct entry {
	uint32_t generation;
	uint8_t state;
	uint8_t known;
	uint8_t reserved; /* an orphan whose number this process keeps from being given out */
	uint8_t again;    /* as the two below: of the read, for a miss */
	uint64_t length;
	uint64_t ahead;
};

#define AHEADS 64

struct ember_guard {
	int group;
	int wake;      /* eventfd: the thread should look at its flags */
	int missed;    /* eventfd: misses wait to be collected */
	uint64_t device;
	uint32_t reserve;
	int top;       /* the thread's: the highest number of an event since none waited */
	uint64_t limit;     /* the thread's: RLIMIT_NOFILE, and when it looked what is left */
	uint64_t looked_ns;
	pthread_t thread;
	bool running;
	struct journal journal;
	struct views views;

	pthread_mutex_t lock; /* the rest of the struct */
	bool stopping;
	bool paused;
	struct entry *entries;
	uint32_t *free_slots;
	uint32_t free_count;
	uint32_t *queue; /* entries of misses, a ring that all entries fit in */
	uint32_t queue_head;
	uint32_t queue_count;
	ember_ahead aheads[AHEADS];
	uint32_t ahead_count;
	uint32_t unreserved; /* orphans whose number a new event could get */
	ember_guard_counts counts;
};

void guard_ring(int eventfd);
void guard_silence(int eventfd);
/* Under the lock. The number of an orphan that is settled or left to others is free again. */
void guard_release(ember_guard *guard, uint32_t entry, int descriptor);
void guard_ahead(ember_guard *guard, uint64_t inode, const struct reading *reading);
/*
 * Answers an entry in state ANSWERING and frees it; on failure it is WAITING again. The state
 * keeps everybody else away from the entry meanwhile.
 */
int guard_finish(ember_guard *guard, uint32_t entry, int error);
/*
 * Lets the readers of so many such entries go on, in order, and frees these; how many it were. The
 * next one the kernel did not take.
 */
unsigned int guard_allow(ember_guard *guard, const uint32_t *entries, unsigned int count);

#endif
