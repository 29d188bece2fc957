/*
 * Inflating with ISA-L, where it was there at build time: more than twice as fast as zlib, but
 * unable to stop between blocks, so it serves decoding from restart points and not their making.
 */
#ifndef EMBER_INFLATE_ISAL_H
#define EMBER_INFLATE_ISAL_H

#include <stddef.h>
#include <stdint.h>

struct isal_stream;

enum { ISAL_STREAM_GOES_ON = 0, ISAL_STREAM_ENDED = 1, ISAL_STREAM_FAULT = -1 };

/* NULL: out of memory, or built without ISA-L (isal_stream_built tells). */
struct isal_stream *isal_stream_open(void);
int isal_stream_built(void);
/* Begin at a gzip header; the member's CRC and length will be verified. */
void isal_stream_member(struct isal_stream *self);
/* Begin between two deflate blocks, `bits` high bits of `byte` being the first input. */
int isal_stream_block(struct isal_stream *self, unsigned bits, uint8_t byte,
		      const uint8_t *window, uint32_t window_bytes);
/* Advances both buffers. ENDED: a member is complete, or a deflate stream that began in a block. */
int isal_stream_run(struct isal_stream *self, const uint8_t **in, uint32_t *in_bytes,
		    uint8_t **out, uint32_t *out_bytes);
/* Whole bytes taken from the input behind the end of a deflate stream: its trailer's first. */
unsigned isal_stream_surplus(const struct isal_stream *self);
const char *isal_stream_fault(const struct isal_stream *self);
void isal_stream_close(struct isal_stream *self);

#endif
