/*
 * What the table of views tells of readers: which read in order and how far they will come, and
 * that those who read anywhere make nobody read ahead.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "streams.h"
#include "views.h"

#define CHUNK 65536u
#define CHUNKS 4096u
#define LENGTH ((uint64_t)CHUNKS * CHUNK)
#define PAGE 4096u
#define MOST (4u << 20)
#define INODE 7

static uint8_t bitmap[CHUNKS / 8];
static struct views views;

static void begin(bool all_here)
{
	memset(bitmap, all_here ? 0xff : 0, sizeof(bitmap));
	CHECK_EQ(views_init(&views), 0);
	CHECK_EQ(views_add(&views, INODE, bitmap, sizeof(bitmap), CHUNK, LENGTH), 0);
	views_read_ahead(&views, MOST);
}

static enum view_answer look(uint64_t offset, uint64_t length, struct reading *reading)
{
	return views_check(&views, INODE, offset, &length, reading);
}

static void bring(uint64_t offset, uint64_t length)
{
	for (uint64_t n = offset / CHUNK; n <= (offset + length - 1) / CHUNK; n++)
		bitmap[n / 8] |= (uint8_t)(1u << (n % 8));
}

/* Reads the view in order, page by page, as an owner would have it that does as it is told. */
static void a_reader_in_order_misses_little(void)
{
	unsigned int misses = 0, hints = 0;
	struct reading reading;

	begin(false);
	for (uint64_t at = 0; at < 64u << 20; at += PAGE) {
		enum view_answer answer = look(at, PAGE, &reading);

		if (answer == VIEW_MISSING) {
			misses++;
			bring(at, PAGE);
		} else if (reading.ahead_length) {
			hints++;
		}
		CHECK(reading.ahead_length <= MOST);
		if (reading.ahead_length) {
			CHECK_EQ(reading.ahead_offset, at + PAGE);
			bring(reading.ahead_offset, reading.ahead_length);
		}
	}
	CHECK(misses <= 2);
	CHECK(hints >= 16 && hints <= 64); /* half of what it may look ahead, each time */
	views_free(&views);
}

static void the_window_grows_with_the_run(void)
{
	uint64_t last = 0;
	struct reading reading;

	begin(false);
	for (unsigned int n = 0; n < 64; n++) { /* nothing ever comes: each of them is a miss */
		CHECK_EQ(look((uint64_t)n * CHUNK, CHUNK, &reading), VIEW_MISSING);
		CHECK(reading.ahead_length >= last);
		CHECK(reading.ahead_length <= 2 * (uint64_t)(n + 1) * CHUNK);
		last = reading.ahead_length;
	}
	CHECK_EQ(last, MOST);
	views_free(&views);
}

static void readers_that_read_anywhere_make_nobody_read_ahead(void)
{
	struct reading reading;

	begin(false);
	srand(3);
	for (unsigned int n = 0; n < 200; n++) {
		uint64_t at = (uint64_t)(n * 2654435761u % CHUNKS) * CHUNK;

		look(at, PAGE, &reading);
		CHECK_EQ(reading.ahead_length, 0);
	}
	CHECK(reading.again < 8);
	views_free(&views);
}

static void several_readers_have_a_stream_each(void)
{
	struct reading reading;
	unsigned int told = 0;

	begin(true);
	memset(bitmap + CHUNKS / 16, 0, CHUNKS / 16); /* the second half is missing */
	for (uint64_t at = 0; at < 2u << 20; at += PAGE)
		for (unsigned int reader = 0; reader < 8; reader++) {
			uint64_t base = LENGTH / 2 - (1u << 20) - reader * (16u << 20);

			look(base + at, PAGE, &reading);
			told += reader > 0 && reading.ahead_length > 0;
			CHECK(reading.again > 0);
		}
	CHECK_EQ(told, 0); /* all is here where seven of them read */
	CHECK(reading.again > 200);
	views_free(&views);
}

static void pages_out_of_order_and_read_again_are_one_stream(void)
{
	struct streams streams;
	struct stream *stream = NULL;

	streams_init(&streams);
	for (uint64_t at = 0; at < 1u << 20; at += 2 * PAGE) {
		streams_note(&streams, at + PAGE, PAGE, CHUNK);
		stream = streams_note(&streams, at, PAGE, CHUNK);
		stream = streams_note(&streams, at, PAGE, CHUNK);
	}
	CHECK_EQ(streams.count, 1);
	CHECK_EQ(stream->end, 1u << 20);
	CHECK(stream->run <= 1u << 20);
	CHECK(stream->run >= 1u << 19);
}

static void the_end_of_a_view_is_the_end_of_what_is_ahead(void)
{
	struct reading reading;
	uint64_t at;

	begin(false);
	for (at = LENGTH - (1u << 20); at < LENGTH; at += CHUNK) {
		look(at, CHUNK, &reading);
		CHECK(reading.ahead_length <= LENGTH - at - CHUNK);
	}
	CHECK_EQ(reading.ahead_length, 0);
	look(LENGTH + PAGE, PAGE, &reading);
	CHECK_EQ(reading.ahead_length, 0);
	/* The view is registered anew, shorter, while a stream stands behind its end. */
	CHECK_EQ(views_add(&views, INODE, bitmap, sizeof(bitmap), CHUNK, CHUNK), 0);
	look(0, CHUNK, &reading);
	CHECK_EQ(reading.ahead_length, 0);
	views_free(&views);
}

static void nothing_is_told_unless_it_is_wanted(void)
{
	struct reading reading;

	begin(false);
	views_read_ahead(&views, 0);
	for (uint64_t at = 0; at < 4u << 20; at += CHUNK) {
		CHECK_EQ(look(at, CHUNK, &reading), VIEW_MISSING);
		CHECK_EQ(reading.ahead_length, 0);
	}
	views_free(&views);
}

int main(void)
{
	a_reader_in_order_misses_little();
	the_window_grows_with_the_run();
	readers_that_read_anywhere_make_nobody_read_ahead();
	several_readers_have_a_stream_each();
	pages_out_of_order_and_read_again_are_one_stream();
	the_end_of_a_view_is_the_end_of_what_is_ahead();
	nothing_is_told_unless_it_is_wanted();
	return 0;
}
