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
