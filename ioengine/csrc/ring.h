/*
 * ring.h: what ring.c (a ring's life) and ring_turn.c (its requests) share.
 */
#ifndef EMBER_RING_H
#define EMBER_RING_H

#include "ember_io.h"

#include <liburing.h>

/* One request, from the turn that takes it in to the turn that brings it back. */
struct slot {
	struct ember_ring_request asked;
	uint32_t done;	  /* bytes moved so far */
	uint32_t sq_end;  /* submission tail behind this round's entries */
	int32_t moved;	  /* this round's result of the transfer */
	int32_t synced;	  /* this round's result of the fdatasync */
	uint8_t active;
	uint8_t entries;  /* of this round */
	uint8_t waiting;  /* completions still to come */
	uint8_t transfer; /* this round moves bytes */
	uint8_t tries;
};

struct ember_ring {
	struct io_uring uring;
	struct slot *slots;
	uint8_t *arena;
	unsigned depth;
	unsigned active;
	unsigned buffers;
	unsigned buffer_bytes;
	int event;
	int registered;
	int dead;	/* -errno of the submission that the kernel refused for good */
};

#endif
