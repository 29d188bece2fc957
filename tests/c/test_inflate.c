/*
 * inflate.c: whatever the pieces and the members, the same bytes come out; from every restart
 * point the rest comes out; nothing that is wrong passes; nothing hostile hurts.
 */
#include "check.h"
#include "ember_io.h"

#include <errno.h>
#include <string.h>
#include <zlib.h>

enum { PLAIN = 100000, SPACING = 9000, CHUNK = 4096, POINTS = 64, WINDOW = 32768 };

static uint8_t plain[PLAIN];
static uint8_t stored[2 * PLAIN];
static uint8_t output[PLAIN + 1];
static uint32_t seed = 1;
static int with_isal;

static uint32_t random_below(uint32_t limit)
{
	seed = seed * 1664525u + 1013904223u;
	return (seed >> 8) % limit;
}

static void make_plain(void)
{
	size_t at = 0;

	while (at < PLAIN) {
		size_t length = 1 + random_below(60);

		for (size_t i = 0; i < length && at < PLAIN; i++, at++)
			plain[at] = at > 40000 && length > 20 ? plain[at - 31000 - length] :
								(uint8_t)random_below(256);
	}
}

static size_t add_member(size_t at, const uint8_t *data, size_t length, int level)
{
	z_stream z = { 0 };

	CHECK_EQ(deflateInit2(&z, level, Z_DEFLATED, 31, 1, Z_DEFAULT_STRATEGY), Z_OK);
	z.next_in = (z_const Bytef *)data;
	z.avail_in = length;
	z.next_out = stored + at;
	z.avail_out = sizeof(stored) - at;
	CHECK_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
	at += z.total_out;
	deflateEnd(&z);
	return at;
}

static size_t members(size_t size, int level)
{
	size_t at = 0;

	for (size_t begin = 0; begin < PLAIN; begin += size)
		at = add_member(at, plain + begin, size < PLAIN - begin ? size : PLAIN - begin,
				level);
	return at;
}

struct run {
	size_t produced;
	size_t consumed;
	size_t point_count;
	size_t end_count;
	uint64_t last_end;
	ember_inflate_point points[POINTS];
	uint8_t windows[POINTS][WINDOW];
};

static struct run run;
static struct run whole;

/* Feeds the stored bytes from `in` in pieces; 0 or what step said. */
static int drive(ember_inflate *self, size_t in, size_t length, size_t piece, size_t room)
{
	uint64_t ends[8];
	int rc = 0;
	long idle = 0;

	memset(&run, 0, offsetof(struct run, points));
	run.consumed = in;
	while (rc >= 0) {
		size_t left = length - run.consumed;
		size_t space = PLAIN + 1 - run.produced;
		ember_inflate_io io = {
			.input = stored + run.consumed,
			.output = output + run.produced,
		};

		io.in_bytes = left < piece ? left : piece;
		io.out_bytes = space < room ? space : room;
		io.ends = ends;
		io.ends_room = 8;
		rc = ember_inflate_step(self, &io);
		CHECK(io.consumed <= io.in_bytes && io.produced <= io.out_bytes);
		run.consumed += io.consumed;
		run.produced += io.produced;
		run.end_count += io.ends_count;
		if (io.ends_count)
			run.last_end = ends[io.ends_count - 1];
		if (rc == 2) {
			CHECK(run.point_count < POINTS);
			CHECK_EQ(ember_inflate_take(self, &run.points[run.point_count],
						    run.windows[run.point_count]),
				 0);
			run.point_count++;
		}
		idle = io.consumed || io.produced ? 0 : idle + 1;
		if (idle > 4 || run.produced > PLAIN || (rc == 0 && !left))
			break;
	}
	return rc;
}

static void check_restarts(size_t length, int resumed_by_isal)
{
	for (size_t i = 0; i < whole.point_count; i++) {
		const ember_inflate_point *at = &whole.points[i];
		ember_inflate *self;

		CHECK_EQ(ember_inflate_resume(&self, at, whole.windows[i], resumed_by_isal), 0);
		CHECK_EQ(drive(self, at->in_offset, length, 5000, 7001), 0);
		CHECK_EQ(run.produced, PLAIN - at->out_offset);
		CHECK_EQ(memcmp(output, plain + at->out_offset, run.produced), 0);
		CHECK_EQ(ember_inflate_at_end(self), 1);
		ember_inflate_close(self);
	}
}

static void test_every_piece_size_gives_the_same(void)
{
	static const size_t member_sizes[] = { PLAIN, 40000, 5000, 777 };
	static const size_t pieces[] = { 3, 130, 4096, 2 * PLAIN };

	for (int level = 0; level <= 9; level += 3)
		for (size_t m = 0; m < 4; m++) {
			size_t length = members(member_sizes[m], level);

			for (size_t p = 0; p < 4; p++) {
				size_t room = pieces[(p + m) % 4];
				ember_inflate *self;

				CHECK_EQ(ember_inflate_open(&self, SPACING, CHUNK, with_isal), 0);
				CHECK_EQ(ember_inflate_at_end(self), 0);
				CHECK_EQ(drive(self, 0, length, pieces[p], room), 0);
				CHECK_EQ(run.consumed, length);
				CHECK_EQ(run.produced, PLAIN);
				CHECK_EQ(memcmp(output, plain, PLAIN), 0);
				CHECK_EQ(run.end_count, PLAIN / CHUNK);
				CHECK(run.last_end <= length);
				CHECK_EQ(ember_inflate_at_end(self), 1);
				ember_inflate_close(self);
			}
			CHECK(level == 0 || run.point_count >= (with_isal ? 4 : 8));
			whole = run;
			check_restarts(length, 0);
			check_restarts(length, 1);
		}
}

static int decode(size_t length)
{
	ember_inflate *self;
	int rc;

	CHECK_EQ(ember_inflate_open(&self, SPACING, 0, with_isal), 0);
	rc = drive(self, 0, length, 4096, 65536);
	if (rc == 0 && !ember_inflate_at_end(self))
		rc = -EPIPE;
	CHECK(rc != -EBADMSG || strlen(ember_inflate_fault(self)) > 0);
	ember_inflate_close(self);
	return rc;
}

static void test_a_cut_is_seen_wherever_it_is(void)
{
	size_t length = add_member(0, plain, 2000, 6);

	for (size_t cut = 0; cut < length; cut++)
		CHECK_EQ(decode(cut), -EPIPE);
	CHECK_EQ(decode(length), 0);
}

static void test_trailers_are_verified(void)
{
	size_t first = add_member(0, plain, 2000, 6);
	size_t length = add_member(first, plain, 3000, 6);

	for (size_t at = 1; at <= 8; at++) {
		stored[first - at] ^= 4;
		CHECK_EQ(decode(length), -EBADMSG);
		stored[first - at] ^= 4;
	}
	CHECK_EQ(decode(length), 0);
}

static void test_zeros_may_follow_and_nothing_else(void)
{
	size_t length = add_member(0, plain, 2000, 6);

	memset(stored + length, 0, 1000);
	CHECK_EQ(decode(length + 1000), 0);
	stored[length + 999] = 1;
	CHECK_EQ(decode(length + 1000), -EBADMSG);
	memcpy(stored + length, "junk", 4);
	CHECK_EQ(decode(length + 4), -EBADMSG);
	stored[0] = 0;
	CHECK_EQ(decode(length), -EBADMSG);
}

static void test_impossible_points_are_refused(void)
{
	ember_inflate_point bits = { .bits = 8 };
	ember_inflate_point window = { .window_bytes = WINDOW + 1 };
	ember_inflate_point member = { .member = 1, .window_bytes = 1 };
	ember_inflate *self;

	CHECK_EQ(ember_inflate_resume(&self, &bits, plain, 1), -EINVAL);
	CHECK(self == NULL);
	CHECK_EQ(ember_inflate_resume(&self, &window, plain, 1), -EINVAL);
	CHECK_EQ(ember_inflate_resume(&self, &member, plain, 1), -EINVAL);
	ember_inflate_close(NULL);
}

/* Nothing is missing of a window that was trimmed, and not all is left of it. */
static void test_trimmed_windows_are_enough(void)
{
	for (int level = 0; level <= 9; level += 3) {
		size_t length = members(level == 3 ? 40000 : PLAIN, level);
		size_t left = 0, all = 0;

		CHECK_EQ(decode(length), 0);
		whole = run;
		for (size_t i = 0; i < whole.point_count; i++) {
			const ember_inflate_point *at = &whole.points[i];
			uint8_t *window = whole.windows[i];
			size_t few = at->in_offset + 100 < length ? 100 : 0;

			CHECK_EQ(ember_inflate_trim(at, window, stored + at->in_offset, few, 0),
				 0);
			CHECK_EQ(memcmp(window, plain + at->out_offset - at->window_bytes,
					at->window_bytes),
				 0);
			CHECK_EQ(ember_inflate_trim(at, window, stored + at->in_offset,
						    length - at->in_offset, 1),
				 at->window_bytes > 0);
			for (size_t p = 0; p < at->window_bytes; p++)
				left += window[p] != 0;
			all += at->window_bytes;
		}
		CHECK(left < all || !all);
		check_restarts(length, with_isal);
	}
}

static void test_windows_of_wrong_bytes_stay_or_shrink(void)
{
	static uint8_t window[WINDOW];

	for (int round = 0; round < 200; round++) {
		size_t length = members(1 + random_below(PLAIN), (int)random_below(10));
		size_t begin = random_below((uint32_t)length);
		ember_inflate_point at = {
			.in_offset = begin,
			.bits = random_below(8),
			.window_bytes = random_below(WINDOW + 1),
		};

		CHECK(ember_inflate_trim(&at, window, stored + begin, length - begin,
					 round & 1) >= 0);
	}
}

static void test_a_failed_stream_stays_failed(void)
{
	uint8_t byte = 0;
	ember_inflate_io io = { .input = &byte, .in_bytes = 1, .output = &byte, .out_bytes = 1 };
	ember_inflate *self;

	memset(stored, 'x', 100);
	CHECK_EQ(ember_inflate_open(&self, 0, 0, with_isal), 0);
	CHECK_EQ(drive(self, 0, 100, 100, 100), -EBADMSG);
	CHECK_EQ(ember_inflate_step(self, &io), -EBADMSG);
	CHECK_EQ(io.consumed + io.produced, 0);
	ember_inflate_close(self);
}

static void test_hostile_bytes_and_points_do_no_harm(void)
{
	static uint8_t window[WINDOW];

	for (int round = 0; round < 100; round++) {
		size_t length = members(1 + random_below(PLAIN), (int)random_below(10));
		size_t begin = random_below((uint32_t)length / 2);
		ember_inflate_point at = {
			.in_offset = begin,
			.bits = random_below(8),
			.window_bytes = random_below(WINDOW + 1),
		};
		ember_inflate *self;

		for (int flips = 0; flips < 3; flips++)
			stored[random_below((uint32_t)length)] ^= 1u << random_below(8);
		decode(length);
		CHECK_EQ(ember_inflate_resume(&self, &at, window, round & 1), 0);
		drive(self, begin, length, 1 + random_below(9000), 1 + random_below(9000));
		ember_inflate_close(self);
	}
}

int main(void)
{
	make_plain();
	for (with_isal = 0; with_isal < 2; with_isal++) {
		test_every_piece_size_gives_the_same();
		test_a_cut_is_seen_wherever_it_is();
		test_trailers_are_verified();
		test_zeros_may_follow_and_nothing_else();
		test_a_failed_stream_stays_failed();
		test_hostile_bytes_and_points_do_no_harm();
		test_trimmed_windows_are_enough();
	}
	test_windows_of_wrong_bytes_stay_or_shrink();
	test_impossible_points_are_refused();
	return 0;
}
