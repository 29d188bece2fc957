/*
 * What inflate.c (life, members) and inflate_decode.c (zlib and ISA-L inside a member) share.
 */
#ifndef EMBER_INFLATE_H
#define EMBER_INFLATE_H

#include <stdint.h>
#include <zlib.h>

#include "ember_io.h"
#include "inflate_isal.h"

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

int inflate_fail(ember_inflate *self, const char *fault);
void inflate_consume(ember_inflate *self, ember_inflate_io *io, size_t count);
void inflate_set_point(ember_inflate *self, unsigned bits, int member);
uint32_t inflate_clamp(uint64_t value);
/* One call of zlib, which advances the buffers; what its result means, of a point that is due. */
int inflate_run_zlib(ember_inflate *self, const uint8_t **in, uint32_t *in_bytes, uint8_t **out,
		     uint32_t *out_bytes, int due);
int inflate_outcome(ember_inflate *self, int rc, int due);
/* One call of the decoder inside a member. */
int inflate_zlib(ember_inflate *self, ember_inflate_io *io);
int inflate_isal(ember_inflate *self, ember_inflate_io *io);

#endif
