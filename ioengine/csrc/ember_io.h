/*
 * The native half of ioengine: an io_uring ring, the fanotify guard and gzip checkpoints.
 *
 * Every function returns 0 or a count on success, -errno on failure. Close functions accept NULL.
 * Nothing here takes the GIL, knows a digest, or allocates on a hot path.
 */
#ifndef EMBER_IO_H
#define EMBER_IO_H

#include <stdint.h>
#include <stddef.h>

/* cffi: begin */

/* ---- ring.c -------------------------------------------------------------------------------- */

/*
 * A ring moves bytes between files and the caller's arena of equal buffers, with up to `depth`
 * requests in flight, each under a slot number that the caller picks. One call a turn takes new
 * requests, hands them to the kernel in one batch and brings what is over; the eventfd becomes
 * readable when another turn is due. One thread opens, turns and closes.
 */
typedef struct ember_ring ember_ring;

enum ember_ring_kind { EMBER_RING_READ, EMBER_RING_WRITE, EMBER_RING_SYNC };

struct ember_ring_request {
	uint64_t offset; /* in the file */
	uint32_t length;
	uint32_t buffer; /* its number; the transfer starts at its first byte */
	uint32_t slot;	 /* below depth, and not in flight */
	int32_t fd;
	uint8_t kind;
	uint8_t sync; /* after a write: fdatasync before it is over */
};

struct ember_ring_done {
	int64_t result; /* bytes moved, or -errno */
	uint32_t slot;
};

int ember_ring_allowed(int *killed_by);
int ember_ring_open(unsigned depth, void *arena, unsigned buffers, unsigned buffer_bytes,
		    ember_ring **out);
int ember_ring_close(ember_ring *ring);
int ember_ring_eventfd(const ember_ring *ring);
int ember_ring_registered(const ember_ring *ring);
int ember_ring_turn(ember_ring *ring, const struct ember_ring_request *requests, unsigned count,
		    struct ember_ring_done *out, int *postponed);
int ember_ring_active(const ember_ring *ring);

/* ---- guard.c, journal.c -------------------------------------------------------------------- */

/* One read that waits in the kernel for bytes that are not here. */
typedef struct {
	uint64_t token;   /* names the event in ember_guard_answer(); never used twice */
	uint64_t inode;   /* of the view file; 0 when it could not be found out */
	uint64_t offset;  /* bytes into the view */
	uint64_t length;  /* bytes, cut at the end of the view */
	uint64_t ahead;   /* bytes behind it that its reader will read too; 0: it has no order yet */
	int32_t pid;      /* the reading thread, as the kernel names it */
	uint32_t known;   /* 1: the inode is a registered view */
	uint32_t again;   /* 0 to 255: how many of this view's readers read on, of late */
} ember_miss;

/* Somebody reads in order, and will come to something here that is missing. Nobody waits yet. */
typedef struct {
	uint64_t inode;
	uint64_t offset;
	uint64_t length;
} ember_ahead;

/* An event that a dead predecessor took from the group and did not answer. */
typedef struct {
	uint64_t inode;      /* 0: it died before it noted in which view */
	uint64_t offset;
	uint64_t length;     /* 0 with whole = 1: the kernel named no range */
	uint32_t entry;      /* names the orphan in ember_guard_settle() */
	int32_t descriptor;  /* the number by which the kernel knows the event */
	int32_t pid;
	uint32_t whole;
	uint32_t reserved;   /* 1: no new event can get its number, so it may be settled later */
} ember_orphan;

typedef struct {
	uint64_t events;       /* taken from the group since start */
	uint64_t allowed;      /* answered by the thread itself: the chunks were readable */
	uint64_t misses;       /* handed on to the owner */
	uint64_t denied;       /* answered with an error */
	uint64_t read_errors;  /* reads of the group that failed; each may have cost a reader an EIO */
	uint64_t pauses;       /* times the thread stopped reading: out of descriptors or slots */
	uint32_t outstanding;  /* taken and not answered yet, orphans not counted */
	uint32_t orphans;      /* not settled yet */
	int32_t last_error;    /* errno of the last failed read of the group, 0 if none */
	int32_t locked;        /* 1: the journal is locked into memory */
} ember_guard_counts;

typedef struct ember_guard ember_guard;

/* A fanotify group of class PRE_CONTENT with an unlimited queue; its descriptor. */
int ember_guard_group(void);
/* path must be a mount point of its own: the mark covers the whole mount that holds it. */
int ember_guard_mark(int group, const char *path);
/* A sealed memfd with room for so many events (1 to 1,048,576); its descriptor. */
int ember_guard_journal(uint32_t slots);
/*
 * Joins group and journal (both stay the caller's and open until ember_guard_close) and finds the
 * orphans.
 * device: st_dev of the view files. reserve: descriptors under RLIMIT_NOFILE left to the rest of
 * the process. -EBUSY: a living process works with this journal. -EPROTO: not a journal of ours.
 */
int ember_guard_open(ember_guard **out, int group, int journal, uint64_t device, uint32_t reserve);
void ember_guard_close(ember_guard *guard);
/* Ends (on = 1) or brings back (on = 0) the events of the file behind the descriptor. */
int ember_guard_ignore(ember_guard *guard, int descriptor, int on);
int ember_guard_orphans(ember_guard *guard, ember_orphan *out, uint32_t capacity);
/* error 0 lets the orphan's reader go on; else EIO, EAGAIN, ENOSPC, … as fanotify allows. */
int ember_guard_settle(ember_guard *guard, uint32_t entry, int error);
/* Starts the thread; -EBUSY while an unreserved orphan is not settled, -EALREADY if it runs. */
int ember_guard_start(ember_guard *guard);
/* Stops the thread; what is unanswered stays so, for a later start or a successor. */
int ember_guard_stop(ember_guard *guard);
/* An eventfd that is readable while misses, or ranges to read ahead, wait to be collected. */
int ember_guard_eventfd(const ember_guard *guard);
int ember_guard_misses(ember_guard *guard, ember_miss *out, uint32_t capacity);
/* At most so many bytes ahead of a reader are told of; 0 (as it begins): nothing is. */
void ember_guard_read_ahead(ember_guard *guard, uint64_t most_bytes);
/* What to read ahead; the eventfd tells of these too. */
int ember_guard_aheads(ember_guard *guard, ember_ahead *out, uint32_t capacity);
/* -ESTALE: answered already. error as in ember_guard_settle(). */
int ember_guard_answer(ember_guard *guard, uint64_t token, int error);
/*
 * Registers or replaces a view. bitmap: bit n % 8 of byte n / 8 is chunk n, set (release) after
 * the chunk was written; it must stay mapped until ember_guard_remove() has returned.
 */
int ember_guard_add(ember_guard *guard, uint64_t inode, const uint8_t *bitmap,
		    size_t bitmap_bytes, uint32_t chunk_bytes, uint64_t length);
int ember_guard_remove(ember_guard *guard, uint64_t inode);
void ember_guard_count(ember_guard *guard, ember_guard_counts *out);

/* ---- bits.c -------------------------------------------------------------------------------- */

/* Bits [first, first + count) of a bitmap in shared memory; atomic, with release order. */
void ember_bits_set(uint8_t *bits, uint64_t first, uint64_t count);
void ember_bits_clear(uint8_t *bits, uint64_t first, uint64_t count);
/* The first clear bit in [first, end), or -1; a bit seen set is seen with acquire order. */
int64_t ember_bits_next_zero(const uint8_t *bits, uint64_t first, uint64_t end);

/* ---- inflate.c ----------------------------------------------------------------------------- */

/* A place in a gzip blob where inflating can begin: see ember_inflate_resume. */
typedef struct {
	uint64_t in_offset;    /* compressed offset of the first byte to be given */
	uint64_t out_offset;   /* plain offset of the first byte that comes out */
	uint32_t bits;         /* unread (high) bits of that first byte; 0: the byte is wholly unread */
	uint32_t window_bytes; /* plain bytes before out_offset that are needed: 0 to 32,768 */
	uint32_t member;       /* 1: a gzip member's header begins here; 0: inside a member */
} ember_inflate_point;

/* One call's buffers, and what became of them. */
typedef struct {
	const uint8_t *input;
	size_t in_bytes;
	uint8_t *output;
	size_t out_bytes;
	uint64_t *ends;   /* takes the compressed offset at which each plain chunk was complete */
	size_t ends_room;
	size_t consumed;  /* results from here on */
	size_t produced;
	size_t ends_count;
} ember_inflate_io;

typedef struct ember_inflate ember_inflate;

/* spacing 0: no restart points; chunk_bytes 0: no chunk ends.
   with_isal: let ISA-L decode, if it was there at build time. It may look 8 bytes farther ahead,
   and finds chunk ends some 100 bytes late, and not every place between two blocks. */
int ember_inflate_open(ember_inflate **self, uint64_t spacing_bytes, uint64_t chunk_bytes,
		       int with_isal);
int ember_inflate_resume(ember_inflate **self, const ember_inflate_point *at,
			 const uint8_t *window, int with_isal);
int ember_inflate_has_isal(void);
/* 0: all input is consumed; 1: out or ends is full; 2: a restart point waits to be read. */
int ember_inflate_step(ember_inflate *self, ember_inflate_io *io);
/* Copies the point that step has just announced and its window (room for 32,768 bytes). */
int ember_inflate_take(ember_inflate *self, ember_inflate_point *point, uint8_t *window);
/* 1 where a gzip file may end: behind a member or in the zeros after one; else 0. */
int ember_inflate_at_end(const ember_inflate *self);
/* What step's -EBADMSG was about; never NULL. */
const char *ember_inflate_fault(const ember_inflate *self);
/* Zeroes what of a point's window the stored bytes behind it, the first of which is the point's,
   never need. is_all: they go to the blob's end. 1: done; 0: they are too few, or wrong: nothing
   was changed. */
int ember_inflate_trim(const ember_inflate_point *at, uint8_t *window, const uint8_t *input,
		       size_t in_bytes, int is_all);
void ember_inflate_close(ember_inflate *self);

/* cffi: end */

#endif
