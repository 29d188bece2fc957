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
 * A ring owns `depth` request slots and uses the caller's arena of equal buffers. A request is
 * queued (its slot number comes back), goes to the kernel with the next submit, and is over when
 * reap names its slot. Short transfers are continued inside. One thread opens, uses and closes.
 */
typedef struct ember_ring ember_ring;

struct ember_ring_done {
	uint32_t slot;
	int64_t result; /* bytes moved, or -errno */
};

int ember_ring_allowed(int *killed_by);
int ember_ring_open(unsigned depth, void *arena, unsigned buffers, unsigned buffer_bytes,
		    ember_ring **out);
int ember_ring_close(ember_ring *ring);
int ember_ring_eventfd(const ember_ring *ring);
int ember_ring_registered(const ember_ring *ring);
int ember_ring_read(ember_ring *ring, int fd, unsigned buffer, unsigned length, uint64_t offset);
int ember_ring_write(ember_ring *ring, int fd, unsigned buffer, unsigned length, uint64_t offset,
		     int sync);
int ember_ring_sync(ember_ring *ring, int fd);
int ember_ring_submit(ember_ring *ring);
int ember_ring_reap(ember_ring *ring, struct ember_ring_done *out, unsigned room);
int ember_ring_active(const ember_ring *ring);

/* ---- guard.c ------------------------------------------------------------------------------- */

/* ---- inflate.c ----------------------------------------------------------------------------- */

/* ---- bits.c -------------------------------------------------------------------------------- */

/* Bits [first, first + count) of a bitmap in shared memory; atomic, with release order. */
void ember_bits_set(uint8_t *bits, uint64_t first, uint64_t count);
void ember_bits_clear(uint8_t *bits, uint64_t first, uint64_t count);
/* The first clear bit in [first, end), or -1; a bit seen set is seen with acquire order. */
int64_t ember_bits_next_zero(const uint8_t *bits, uint64_t first, uint64_t end);

int ember_io_version(void);

/* cffi: end */

#endif
