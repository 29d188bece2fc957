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

int ember_io_version(void);

/* cffi: end */

#endif
