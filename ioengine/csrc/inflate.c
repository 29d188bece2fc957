/*
 * Inflating gzip files of any number of members, with restart points on the way.
 *
 * A restart point is the state of a deflate decoder between two blocks: compressed offset, bits
 * left over in a byte, and the last 32 KiB of plain bytes. It is the idea of zlib's zran.c example,
 * carried across members: their CRC and length are verified wherever decoding began at a header.
 * A member's header is a point too, without a window. Headers are zlib's to read, and all the rest
 * ISA-L's where it may: it reads ahead, so it is given little input where an end or a point is due.
 */
#include "inflate.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
	GZIP_WINDOW_BITS = 15 + 16,
	RAW_WINDOW_BITS = -15,
	WINDOW_BYTES = 32768,
	MOST_RATIO = 1032, /* of plain to stored bytes, that deflate can have */
};

static int open_at(ember_inflate **self, int window_bits, enum phase phase)
{
	ember_inflate *made = calloc(1, sizeof(*made));
	int rc;

	*self = NULL;
	if (!made)
		return -ENOMEM;
	rc = inflateInit2(&made->z, window_bits);
	if (rc != Z_OK) {
		free(made);
		return rc == Z_MEM_ERROR ? -ENOMEM : -EINVAL;
	}
	made->phase = phase;
	made->fault = "no fault";
	*self = made;
	return 0;
}

int ember_inflate_open(ember_inflate **self, uint64_t spacing_bytes, uint64_t chunk_bytes,
		       int with_isal)
{
	int rc = open_at(self, GZIP_WINDOW_BITS, BETWEEN);

	if (rc < 0)
		return rc;
	(*self)->spacing = spacing_bytes;
	(*self)->chunk_bytes = chunk_bytes;
	if (!with_isal || !isal_stream_built())
		return 0;
	(*self)->isal = isal_stream_open();
	if ((*self)->isal)
		return 0;
	ember_inflate_close(*self);
	*self = NULL;
	return -ENOMEM;
}

int ember_inflate_has_isal(void)
{
	return isal_stream_built();
}

/* Hands the window to the decoder that will need it; ISA-L takes it with the first byte. */
static int set_window(ember_inflate *self, const ember_inflate_point *at, const uint8_t *window,
		      int with_isal)
{
	if (!with_isal || !isal_stream_built()) {
		if (at->window_bytes &&
		    inflateSetDictionary(&self->z, window, at->window_bytes) != Z_OK)
			return -EINVAL;
		return 0;
	}
	self->isal = isal_stream_open();
	self->window = malloc(WINDOW_BYTES);
	if (!self->isal || !self->window)
		return -ENOMEM;
	if (at->window_bytes)
		memcpy(self->window, window, at->window_bytes);
	return 0;
}

int ember_inflate_resume(ember_inflate **self, const ember_inflate_point *at,
			 const uint8_t *window, int with_isal)
{
	int rc;

	*self = NULL;
	if (at->bits > 7 || at->window_bytes > WINDOW_BYTES ||
	    (at->member && (at->bits || at->window_bytes)))
		return -EINVAL;
	if (at->member)
		rc = open_at(self, GZIP_WINDOW_BITS, BETWEEN);
	else
		rc = open_at(self, RAW_WINDOW_BITS, PRIMING);
	if (rc < 0)
		return rc;
	rc = set_window(*self, at, window, with_isal);
	if (rc < 0) {
		ember_inflate_close(*self);
		*self = NULL;
		return rc;
	}
	(*self)->point = *at;
	(*self)->in_total = at->in_offset;
	(*self)->out_total = at->out_offset;
	return 0;
}

/* A member's header, read by zlib, which stops behind it; then the member is ISA-L's. */
static int read_header(ember_inflate *self, ember_inflate_io *io)
{
	uint32_t in_left = inflate_clamp(io->in_bytes - io->consumed);
	const uint8_t *in = io->input + io->consumed;
	uint8_t none = 0, *out = &none;
	uint32_t took = in_left, room = 1;
	int rc = inflate_run_zlib(self, &in, &in_left, &out, &room, 1);

	inflate_consume(self, io, took - in_left);
	if (rc != Z_OK && rc != Z_BUF_ERROR)
		return inflate_outcome(self, rc, 0);
	if ((self->z.data_type & 128) == 0)
		return RUNNING;
	isal_stream_member(self->isal);
	self->ratio = MOST_RATIO;
	self->phase = MEMBER;
	return RUNNING;
}

static int begin_member(ember_inflate *self, const ember_inflate_io *io)
{
	uint64_t since = self->out_total - self->last_point;

	if (self->members && io->input[io->consumed] == 0) {
		self->phase = PADDING;
		return RUNNING;
	}
	if (inflateReset2(&self->z, GZIP_WINDOW_BITS) != Z_OK)
		return -EINVAL;
	self->phase = self->isal ? HEADER : MEMBER;
	if (!self->members || !self->spacing || since < self->spacing)
		return RUNNING;
	inflate_set_point(self, 0, 1);
	return AT_POINT;
}

/* The first byte of a point between two blocks, of which some bits are spent. */
static int prime(ember_inflate *self, ember_inflate_io *io)
{
	const ember_inflate_point *at = &self->point;
	uint8_t byte = io->input[io->consumed];
	int rc = 0;

	if (self->isal)
		rc = isal_stream_block(self->isal, at->bits, byte, self->window, at->window_bytes);
	else if (at->bits && inflatePrime(&self->z, at->bits, byte >> (8 - at->bits)) != Z_OK)
		rc = -EINVAL;
	if (rc < 0)
		return rc;
	if (at->bits)
		inflate_consume(self, io, 1);
	self->phase = RAW;
	return RUNNING;
}

static int skip_trailer(ember_inflate *self, ember_inflate_io *io)
{
	size_t left = io->in_bytes - io->consumed;
	unsigned count = left < self->trailer_left ? left : self->trailer_left;

	inflate_consume(self, io, count);
	self->trailer_left -= count;
	if (!self->trailer_left)
		self->phase = BETWEEN;
	return RUNNING;
}

static int skip_zeros(ember_inflate *self, ember_inflate_io *io)
{
	for (; io->consumed < io->in_bytes; inflate_consume(self, io, 1))
		if (io->input[io->consumed] != 0)
			return inflate_fail(self, "bytes behind the last member that are not gzip");
	return NEEDS_INPUT;
}

int ember_inflate_step(ember_inflate *self, ember_inflate_io *io)
{
	int rc = RUNNING;

	io->consumed = 0;
	io->produced = 0;
	io->ends_count = 0;
	while (rc == RUNNING) {
		int inside = self->phase == MEMBER || self->phase == RAW;

		if (!inside && self->phase != FAILED && io->consumed == io->in_bytes)
			return NEEDS_INPUT;
		switch (self->phase) {
		case BETWEEN:
			rc = begin_member(self, io);
			break;
		case HEADER:
			rc = read_header(self, io);
			break;
		case MEMBER:
		case RAW:
			rc = self->isal ? inflate_isal(self, io) : inflate_zlib(self, io);
			break;
		case PRIMING:
			rc = prime(self, io);
			break;
		case TRAILER:
			rc = skip_trailer(self, io);
			break;
		case PADDING:
			rc = skip_zeros(self, io);
			break;
		case FAILED:
			rc = -EBADMSG;
			break;
		}
	}
	return rc;
}

int ember_inflate_take(ember_inflate *self, ember_inflate_point *point, uint8_t *window)
{
	uInt bytes = 0;

	if (!self->point.member && self->isal)
		bytes = isal_stream_window(self->isal, window, WINDOW_BYTES);
	else if (!self->point.member &&
		 inflateGetDictionary(&self->z, (Bytef *)window, &bytes) != Z_OK)
		return -EINVAL;
	self->point.window_bytes = bytes;
	*point = self->point;
	return 0;
}

int ember_inflate_at_end(const ember_inflate *self)
{
	return self->members > 0 && (self->phase == BETWEEN || self->phase == PADDING);
}

const char *ember_inflate_fault(const ember_inflate *self)
{
	return self->fault;
}

void ember_inflate_close(ember_inflate *self)
{
	if (!self)
		return;
	inflateEnd(&self->z);
	isal_stream_close(self->isal);
	free(self->window);
	free(self);
}
