/*
 * What of a view has been read lately, as streams: places from which somebody reads on. Of a read
 * it tells how far its reader has come in order, and of a view whether its readers tend to read on.
 */
#ifndef EMBER_STREAMS_H
#define EMBER_STREAMS_H

#include <stdint.h>

#define STREAMS 16

struct stream {
	uint64_t end;   /* where it goes on */
	uint64_t run;   /* bytes read in order up to there */
	uint64_t ahead; /* up to where its owner was asked to read ahead */
};

struct streams {
	struct stream of[STREAMS]; /* the one that was read last comes first */
	uint32_t count;
	uint32_t again; /* 0 to 255: how many of those that begin go on, of late */
};

void streams_init(struct streams *streams);
/* Notes a read; the stream that it belongs to. chunk_bytes: reading on means farther than that. */
struct stream *streams_note(struct streams *streams, uint64_t offset, uint64_t length,
			    uint32_t chunk_bytes);

#endif
