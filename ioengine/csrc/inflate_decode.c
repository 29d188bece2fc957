/*
 * Inside a member: one call of zlib or of ISA-L, short of the next place where something is due.
 *
 * zlib stops where it is told to. ISA-L decodes ahead all that it is given, so it gets little where
 * a chunk's end or a restart point is near, and what it has decoded is given out before more.
 */
#include "inflate.h"

#include <errno.h>

enum {
	TRAILER_BYTES = 8,
	/* ISA-L gets this much at least, and at most, on the way to the end of a chunk. */
	LEAST_STRIDE_BYTES = 64,
	MOST_STRIDE_BYTES = 8192,
	SEARCH_DIVISOR = 2, /* the part of each spacing in which a point that is due is looked for */
	LONG_SEARCH = 4,    /* after so many spacings without one it is looked for byte by byte */
	SMALL_RATIO = 16,   /* of plain to stored bytes, from which on strides get shorter */
	GREAT_RATIO = 64,   /* from which on the search goes on all the time */
};

int inflate_fail(ember_inflate *self, const char *fault)
{
	self->phase = FAILED;
	self->fault = fault;
	return -EBADMSG;
}

void inflate_consume(ember_inflate *self, ember_inflate_io *io, size_t count)
{
	io->consumed += count;
	self->in_total += count;
}

/* Plain bytes until the next place where the decoder must stop; all ones: there is none. */
static uint64_t until_stop(const ember_inflate *self)
{
	uint64_t stop = UINT64_MAX;
	uint64_t since = self->out_total - self->last_point;

	if (self->chunk_bytes)
		stop = self->chunk_bytes - self->out_total % self->chunk_bytes;
	if (self->spacing && since < self->spacing && self->spacing - since < stop)
		stop = self->spacing - since;
	return stop;
}

static int point_is_due(const ember_inflate *self)
{
	return self->spacing && self->out_total - self->last_point >= self->spacing;
}

void inflate_set_point(ember_inflate *self, unsigned bits, int member)
{
	self->point.in_offset = self->in_total - (bits ? 1 : 0);
	self->point.out_offset = self->out_total;
	self->point.bits = bits;
	self->point.window_bytes = 0;
	self->point.member = member;
	self->last_point = self->out_total;
}

/* A member is complete, or the deflate stream of one that was resumed inside. */
static int end_stream(ember_inflate *self, unsigned surplus)
{
	self->members++;
	if (self->phase != RAW) {
		self->phase = BETWEEN;
		return surplus ? inflate_fail(self, "bytes behind the last member that are not gzip") :
				 RUNNING;
	}
	self->phase = TRAILER;
	self->trailer_left = TRAILER_BYTES - surplus;
	return RUNNING;
}

int inflate_outcome(ember_inflate *self, int rc, int due)
{
	switch (rc) {
	case Z_STREAM_END:
		return end_stream(self, 0);
	case Z_OK:
		/* 128: between two blocks; 64: the block before was the member's last. */
		if (due && (self->z.data_type & 192) == 128) {
			inflate_set_point(self, self->z.data_type & 7, 0);
			return AT_POINT;
		}
		return RUNNING;
	case Z_BUF_ERROR:
		return RUNNING;
	case Z_MEM_ERROR:
		return -ENOMEM;
	case Z_NEED_DICT:
		return inflate_fail(self, "needs a preset dictionary");
	default:
		return inflate_fail(self, self->z.msg ? self->z.msg : "not a deflate stream");
	}
}

/* One call of zlib; advances the buffers. */
int inflate_run_zlib(ember_inflate *self, const uint8_t **in, uint32_t *in_bytes, uint8_t **out,
		    uint32_t *out_bytes, int due)
{
	int rc;

	self->z.next_in = (z_const Bytef *)*in;
	self->z.avail_in = *in_bytes;
	self->z.next_out = *out;
	self->z.avail_out = *out_bytes;
	rc = inflate(&self->z, due ? Z_BLOCK : Z_NO_FLUSH);
	*in = self->z.next_in;
	*in_bytes = self->z.avail_in;
	*out = self->z.next_out;
	*out_bytes = self->z.avail_out;
	return rc;
}

uint32_t inflate_clamp(uint64_t value)
{
	return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static void gave(ember_inflate *self, ember_inflate_io *io, size_t count)
{
	io->produced += count;
	self->out_total += count;
}

/* One call of zlib, short of the next chunk end and restart point. */
int inflate_zlib(ember_inflate *self, ember_inflate_io *io)
{
	uint32_t in_left = inflate_clamp(io->in_bytes - io->consumed);
	uint64_t room = io->out_bytes - io->produced;
	uint64_t stop = until_stop(self);
	uint32_t out_left = inflate_clamp(room < stop ? room : stop);
	const uint8_t *in = io->input + io->consumed;
	uint8_t *out = io->output + io->produced;
	uint32_t took = in_left, made = out_left;
	int had_input = in_left > 0;
	int due = point_is_due(self);
	int rc;

	if (!room || (self->chunk_bytes && io->ends_count == io->ends_room))
		return NEEDS_ROOM;
	rc = inflate_run_zlib(self, &in, &in_left, &out, &out_left, due);
	took -= in_left;
	made -= out_left;
	inflate_consume(self, io, took);
	gave(self, io, made);
	if (made && self->chunk_bytes && self->out_total % self->chunk_bytes == 0)
		io->ends[io->ends_count++] = self->in_total;
	rc = inflate_outcome(self, rc, due);
	if (rc == RUNNING && !took && !made && !had_input)
		return NEEDS_INPUT;
	return rc;
}

static uint64_t decoded(const ember_inflate *self)
{
	return self->out_total + isal_stream_pending(self->isal);
}

/* Small steps are slow, and some streams have no header that they could find: then in part only,
   but where much comes of few bytes. */
static int is_searching(const ember_inflate *self)
{
	uint64_t since = self->out_total - self->last_point;

	if (!self->spacing || since < self->spacing)
		return 0;
	return self->ratio >= GREAT_RATIO ||
	       since % self->spacing < self->spacing / SEARCH_DIVISOR;
}

/* What packs well is searched in smaller steps, what has been searched for long byte by byte. */
static uint64_t search_stride(const ember_inflate *self)
{
	uint64_t near = isal_stream_stride(self->isal) / (1 + self->ratio / SMALL_RATIO);

	if (self->out_total - self->last_point >= LONG_SEARCH * self->spacing)
		near = 1;
	return near ? near : 1;
}

/* What ISA-L may take now: it comes near to the next place, and goes on in small steps. */
static uint32_t stride(const ember_inflate *self, uint64_t in_left)
{
	uint64_t most = in_left;
	uint64_t left = until_stop(self);

	if (is_searching(self)) {
		uint64_t near = search_stride(self);

		most = near < most ? near : most;
	}
	if (left != UINT64_MAX) {
		uint64_t near = left * 7 / (8 * (self->ratio + 1));

		if (near < LEAST_STRIDE_BYTES)
			near = LEAST_STRIDE_BYTES;
		if (near > MOST_STRIDE_BYTES)
			near = MOST_STRIDE_BYTES;
		most = near < most ? near : most;
	}
	return inflate_clamp(most);
}

/* Tells of the chunks that are decoded; 0 if there was no room for all. */
static int tell_ends(ember_inflate *self, ember_inflate_io *io)
{
	if (!self->chunk_bytes)
		return 1;
	for (uint64_t count = decoded(self) / self->chunk_bytes; self->chunks < count;
	     self->chunks++) {
		if (io->ends_count == io->ends_room)
			return 0;
		io->ends[io->ends_count++] = self->ends_at;
	}
	return 1;
}

static int isal_point(ember_inflate *self)
{
	uint64_t bits_back;

	if (!point_is_due(self) || !isal_stream_between(self->isal, &bits_back))
		return RUNNING;
	inflate_set_point(self, 0, 0);
	self->point.in_offset = self->in_total - (bits_back + 7) / 8;
	self->point.bits = bits_back % 8;
	return AT_POINT;
}

/* One call of ISA-L. What it has decoded ahead is given out before it gets more. */
int inflate_isal(ember_inflate *self, ember_inflate_io *io)
{
	uint64_t before = decoded(self);
	uint64_t in_left = isal_stream_pending(self->isal) ? 0 : io->in_bytes - io->consumed;
	uint32_t in_bytes = stride(self, in_left);
	uint32_t out_bytes = inflate_clamp(io->out_bytes - io->produced);
	const uint8_t *in = io->input + io->consumed;
	uint8_t *out = io->output + io->produced;
	uint32_t took = in_bytes, made = out_bytes;
	int had_input = io->in_bytes > io->consumed;
	int rc;

	if (!out_bytes || !tell_ends(self, io))
		return NEEDS_ROOM;
	rc = isal_stream_run(self->isal, &in, &in_bytes, &out, &out_bytes);
	took -= in_bytes;
	made -= out_bytes;
	inflate_consume(self, io, took);
	gave(self, io, made);
	self->ends_at = took ? self->in_total : self->ends_at;
	if (took)
		self->ratio = (decoded(self) - before) / took;
	if (rc == ISAL_STREAM_FAULT)
		return inflate_fail(self, isal_stream_fault(self->isal));
	if (!tell_ends(self, io))
		return NEEDS_ROOM;
	if (rc == ISAL_STREAM_ENDED)
		return end_stream(self, isal_stream_surplus(self->isal));
	rc = isal_point(self);
	if (rc == RUNNING && !took && !made && !had_input)
		return NEEDS_INPUT;
	return rc;
}
