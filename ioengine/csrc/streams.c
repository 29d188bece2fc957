/*
 * Streams of reads. The kernel reads files of a layer page by page, not wholly in order, and each
 * of several readers has a place of its own: so a read belongs to a stream if it is near its end.
 */
#include "streams.h"

#include <string.h>

#define BACK_BYTES (64 * 1024)   /* pages come out of order */
#define LEAP_BYTES (128 * 1024)  /* what a reader may pass over: headers, pages cached before */
#define AGAIN_START 128
#define AGAIN_MOST 255

void streams_init(struct streams *streams)
{
	memset(streams, 0, sizeof(*streams));
	streams->again = AGAIN_START;
}

static uint32_t find(const struct streams *streams, uint64_t offset)
{
	uint32_t i;

	for (i = 0; i < streams->count; i++) {
		uint64_t end = streams->of[i].end;

		if (offset + BACK_BYTES >= end && offset <= end + LEAP_BYTES)
			break;
	}
	return i;
}

struct stream *streams_note(struct streams *streams, uint64_t offset, uint64_t length,
			    uint32_t chunk_bytes)
{
	uint32_t at = find(streams, offset);
	uint64_t end = offset + length;
	struct stream stream = { .end = end, .run = length };

	if (at < streams->count) {
		uint64_t before = streams->of[at].run;

		stream = streams->of[at];
		if (end > stream.end) {
			stream.run += offset > stream.end ? length : end - stream.end;
			stream.end = end;
		}
		if (before <= chunk_bytes && stream.run > chunk_bytes)
			streams->again += (AGAIN_MOST - streams->again) / 2;
	} else {
		streams->again -= streams->again / 8;
		if (streams->count < STREAMS)
			streams->count++;
		else
			at = STREAMS - 1;
	}
	memmove(&streams->of[1], &streams->of[0], at * sizeof(stream));
	streams->of[0] = stream;
	return &streams->of[0];
}
