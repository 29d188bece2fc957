/*
 * Ranges of a bitmap, word by word and at the edges bit by bit: what the guard says of a read must
 * be what looking at each chunk says, wherever the bitmap lies in memory.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ember_io.h"
#include "views.h"

#define CHUNKS 700u
#define CHUNK 4096u
#define INODE 7u

static bool each_set(const uint8_t *bitmap, unsigned int first, unsigned int last)
{
	for (unsigned int n = first; n <= last; n++)
		if (!(bitmap[n / 8] & (1u << (n % 8))))
			return false;
	return true;
}

static void check_range(struct views *views, const uint8_t *bitmap, unsigned int first,
			unsigned int last)
{
	uint64_t length = (uint64_t)(last - first + 1) * CHUNK;
	enum view_answer wanted = each_set(bitmap, first, last) ? VIEW_READABLE : VIEW_MISSING;
	struct reading reading;

	CHECK_EQ(views_check(views, INODE, (uint64_t)first * CHUNK, &length, &reading), wanted);
}

static void ranges_are_what_their_bits_are(unsigned int misaligned)
{
	static uint8_t room[CHUNKS / 8 + 32] __attribute__((aligned(8)));
	uint8_t *bitmap = room + misaligned;
	struct views views;

	memset(room, 0xff, sizeof(room));
	CHECK_EQ(views_init(&views), 0);
	CHECK_EQ(views_add(&views, INODE, bitmap, CHUNKS / 8 + 1, CHUNK,
			   (uint64_t)CHUNKS * CHUNK), 0);
	check_range(&views, bitmap, 0, CHUNKS - 1);
	for (unsigned int hole = 0; hole < CHUNKS; hole++) {
		bitmap[hole / 8] &= (uint8_t)~(1u << (hole % 8));
		check_range(&views, bitmap, 0, CHUNKS - 1);
		check_range(&views, bitmap, hole, hole);
		if (hole > 0)
			check_range(&views, bitmap, 0, hole - 1);
		if (hole + 1 < CHUNKS)
			check_range(&views, bitmap, hole + 1, CHUNKS - 1);
		for (int turn = 0; turn < 20; turn++) {
			unsigned int first = (unsigned int)rand() % CHUNKS;
			unsigned int last = first + (unsigned int)rand() % (CHUNKS - first);

			check_range(&views, bitmap, first, last);
		}
		bitmap[hole / 8] |= (uint8_t)(1u << (hole % 8));
	}
	views_free(&views);
}

static void the_next_zero_is_found(void)
{
	static uint8_t bits[CHUNKS / 8 + 1];

	memset(bits, 0xff, sizeof(bits));
	for (unsigned int hole = 0; hole < CHUNKS; hole++) {
		bits[hole / 8] &= (uint8_t)~(1u << (hole % 8));
		CHECK_EQ(ember_bits_next_zero(bits, 0, CHUNKS), hole);
		CHECK_EQ(ember_bits_next_zero(bits, hole, CHUNKS), hole);
		CHECK_EQ(ember_bits_next_zero(bits, 0, hole), -1);
		CHECK_EQ(ember_bits_next_zero(bits, hole + 1, CHUNKS), -1);
		bits[hole / 8] |= (uint8_t)(1u << (hole % 8));
	}
}

int main(void)
{
	srand(3);
	for (unsigned int misaligned = 0; misaligned < 8; misaligned++)
		ranges_are_what_their_bits_are(misaligned);
	the_next_zero_is_found();
	return 0;
}
