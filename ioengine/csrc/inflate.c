/*
 * Inflating gzip files of any number of members, with restart points on the way.
 *
 * A restart point is the state of a deflate decoder between two blocks: compressed offset, bits
 * left over in a byte, and the last 32 KiB of plain bytes. It is the idea of zlib's zran.c example,
 * carried across members: their CRC and length are verified wherever decoding began at a header.
 * A member's header is a point too, without a window. Headers are zlib's to read, and all the rest
 * ISA-L's where it may: it reads ahead, so it is given little input where an end or a point is due.
 */
#include "ember_io.h"
#include "inflate_isal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum {
	GZIP_WINDOW_BITS = 15 + 16,
	RAW_WINDOW_BITS = -15,
	WINDOW_BYTES = 32768,
	TRAILER_BYTES = 8,
	/* ISA-L gets this much at least, and at most, on the way to the end of a chunk. */
	LEAST_STRIDE_BYTES = 64,
	MOST_STRIDE_BYTES = 8192,
	SEARCH_DIVISOR = 2, /* the part of each spacing in which a point that is due is looked for */
	LONG_SEARCH = 4,    /* after so many spacings without one it is looked for byte by byte */
	SMALL_RATIO = 16,   /* of plain to stored bytes, from which on strides get shorter */
	GREAT_RATIO = 64,   /* from which on the search goes on all the time */
	MOST_RATIO = 1032,  /* that deflate can have */
};

enum { NEEDS_INPUT = 0, NEEDS_ROOM = 1, AT_POINT = 2, RUNNING = 3 };

enum phase {
	BETWEEN, /* at the first byte of a member, or at the end */
	HEADER,  /* inside the header of a member that ISA-L will decode */
	MEMBER,  /* inside a member whose header was seen: the decoder checks its trailer */
	PRIMING, /* resumed inside a member: the first byte is still to come */
	RAW,     /* resumed inside a member */
	TRAILER, /* behind the deflate stream of a member that was resumed */
	PADDING, /* zeros behind the last member, as tapes leave them */
	FAILED,
};

struct ember_inflate {
	z_stream z;
	struct isal_stream *isal; /* NULL: zlib decodes */
	uint8_t *window;          /* of a point that is resumed by ISA-L, until it begins */
	enum phase phase;
	uint64_t in_total;
	uint64_t out_total;
	uint64_t spacing;
	uint64_t chunk_bytes;
	uint64_t last_point; /* plain offset of the last restart point */
	uint64_t members;    /* members that ended */
	uint64_t chunks;     /* chunk ends that were told of */
	uint64_t ends_at;    /* the compressed offset that gave those that were not (ISA-L) */
	uint64_t ratio;      /* of plain to stored bytes, lately (ISA-L) */
	unsigned trailer_left;
	ember_inflate_point point;
	const char *fault;
};

static int fail(ember_inflate *self, const char *fault)
{
	self->phase = FAILED;
	self->fault = fault;
	return -EBADMSG;
}

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

static void consume(ember_inflate *self, ember_inflate_io *io, size_t count)
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

static void set_point(ember_inflate *self, unsigned bits, int member)
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
		return surplus ? fail(self, "bytes behind the last member that are not gzip") :
				 RUNNING;
	}
	self->phase = TRAILER;
	self->trailer_left = TRAILER_BYTES - surplus;
	return RUNNING;
}

static int after_inflate(ember_inflate *self, int rc, int due)
{
	switch (rc) {
	case Z_STREAM_END:
		return end_stream(self, 0);
	case Z_OK:
		/* 128: between two blocks; 64: the block before was the member's last. */
		if (due && (self->z.data_type & 192) == 128) {
			set_point(self, self->z.data_type & 7, 0);
			return AT_POINT;
		}
		return RUNNING;
	case Z_BUF_ERROR:
		return RUNNING;
	case Z_MEM_ERROR:
		return -ENOMEM;
	case Z_NEED_DICT:
		return fail(self, "needs a preset dictionary");
	default:
		return fail(self, self->z.msg ? self->z.msg : "not a deflate stream");
	}
}

/* One call of zlib; advances the buffers. */
static int run_zlib(ember_inflate *self, const uint8_t **in, uint32_t *in_bytes, uint8_t **out,
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

static uint32_t clamp(uint64_t value)
{
	return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static void gave(ember_inflate *self, ember_inflate_io *io, size_t count)
{
	io->produced += count;
	self->out_total += count;
}

/* One call of zlib, short of the next chunk end and restart point. */
static int zlib_some(ember_inflate *self, ember_inflate_io *io)
{
	uint32_t in_left = clamp(io->in_bytes - io->consumed);
	uint64_t room = io->out_bytes - io->produced;
	uint64_t stop = until_stop(self);
	uint32_t out_left = clamp(room < stop ? room : stop);
	const uint8_t *in = io->input + io->consumed;
	uint8_t *out = io->output + io->produced;
	uint32_t took = in_left, made = out_left;
	int had_input = in_left > 0;
	int due = point_is_due(self);
	int rc;

	if (!room || (self->chunk_bytes && io->ends_count == io->ends_room))
		return NEEDS_ROOM;
	rc = run_zlib(self, &in, &in_left, &out, &out_left, due);
	took -= in_left;
	made -= out_left;
	consume(self, io, took);
	gave(self, io, made);
	if (made && self->chunk_bytes && self->out_total % self->chunk_bytes == 0)
		io->ends[io->ends_count++] = self->in_total;
	rc = after_inflate(self, rc, due);
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
	return clamp(most);
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
	set_point(self, 0, 0);
	self->point.in_offset = self->in_total - (bits_back + 7) / 8;
	self->point.bits = bits_back % 8;
	return AT_POINT;
}

/* One call of ISA-L. What it has decoded ahead is given out before it gets more. */
static int isal_some(ember_inflate *self, ember_inflate_io *io)
{
	uint64_t before = decoded(self);
	uint64_t in_left = isal_stream_pending(self->isal) ? 0 : io->in_bytes - io->consumed;
	uint32_t in_bytes = stride(self, in_left);
	uint32_t out_bytes = clamp(io->out_bytes - io->produced);
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
	consume(self, io, took);
	gave(self, io, made);
	self->ends_at = took ? self->in_total : self->ends_at;
	if (took)
		self->ratio = (decoded(self) - before) / took;
	if (rc == ISAL_STREAM_FAULT)
		return fail(self, isal_stream_fault(self->isal));
	if (!tell_ends(self, io))
		return NEEDS_ROOM;
	if (rc == ISAL_STREAM_ENDED)
		return end_stream(self, isal_stream_surplus(self->isal));
	rc = isal_point(self);
	if (rc == RUNNING && !took && !made && !had_input)
		return NEEDS_INPUT;
	return rc;
}

/* A member's header, read by zlib, which stops behind it; then the member is ISA-L's. */
static int read_header(ember_inflate *self, ember_inflate_io *io)
{
	uint32_t in_left = clamp(io->in_bytes - io->consumed);
	const uint8_t *in = io->input + io->consumed;
	uint8_t none = 0, *out = &none;
	uint32_t took = in_left, room = 1;
	int rc = run_zlib(self, &in, &in_left, &out, &room, 1);

	consume(self, io, took - in_left);
	if (rc != Z_OK && rc != Z_BUF_ERROR)
		return after_inflate(self, rc, 0);
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
	set_point(self, 0, 1);
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
		consume(self, io, 1);
	self->phase = RAW;
	return RUNNING;
}

static int skip_trailer(ember_inflate *self, ember_inflate_io *io)
{
	size_t left = io->in_bytes - io->consumed;
	unsigned count = left < self->trailer_left ? left : self->trailer_left;

	consume(self, io, count);
	self->trailer_left -= count;
	if (!self->trailer_left)
		self->phase = BETWEEN;
	return RUNNING;
}

static int skip_zeros(ember_inflate *self, ember_inflate_io *io)
{
	for (; io->consumed < io->in_bytes; consume(self, io, 1))
		if (io->input[io->consumed] != 0)
			return fail(self, "bytes behind the last member that are not gzip");
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
			rc = self->isal ? isal_some(self, io) : zlib_some(self, io);
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
