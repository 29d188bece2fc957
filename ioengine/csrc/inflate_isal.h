/*
 * Inflating with ISA-L, where it was there at build time: more than twice as fast as zlib. It
 * cannot be told to stop between blocks, but whoever gives it little input at a time finds it at
 * rest in a block's header, and then it knows where that began.
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
/* Begin behind a gzip header; the member's CRC and length will be verified. */
void isal_stream_member(struct isal_stream *self);
/* Begin between two deflate blocks, `bits` high bits of `byte` being the first input. */
int isal_stream_block(struct isal_stream *self, unsigned bits, uint8_t byte,
		      const uint8_t *window, uint32_t window_bytes);
/* Advances both buffers. ENDED: a member is complete, or a deflate stream that began in a block. */
int isal_stream_run(struct isal_stream *self, const uint8_t **in, uint32_t *in_bytes,
		    uint8_t **out, uint32_t *out_bytes);
/* Whole bytes taken from the input behind the end of a deflate stream: its trailer's first. */
unsigned isal_stream_surplus(const struct isal_stream *self);
/* Plain bytes that are decoded and were not given out, for want of room. */
size_t isal_stream_pending(const struct isal_stream *self);
/* 1: all input ended within the header of a block, which began so many bits before; else 0. */
int isal_stream_between(const struct isal_stream *self, uint64_t *bits_back);
/* Copies up to `room` of the last plain bytes, of this member alone; none may be pending. */
uint32_t isal_stream_window(const struct isal_stream *self, uint8_t *window, uint32_t room);
/* So much input, at most, lets it come to rest in the next block's header. */
uint32_t isal_stream_stride(const struct isal_stream *self);
const char *isal_stream_fault(const struct isal_stream *self);
void isal_stream_close(struct isal_stream *self);

#endif
