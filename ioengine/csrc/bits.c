/*
 * Bitmaps in shared memory: chunk n is bit n % 8 of byte n / 8.
 *
 * Writers may be many threads; a reader in C (the guard) acquires what a writer here releases, so a
 * set bit implies that the bytes it stands for were written before it. One atomic per byte touched.
 */
#include "ember_io.h"

#include <stdbool.h>

static uint8_t mask_of(uint64_t byte, uint64_t first, uint64_t end)
{
	uint64_t low = byte * 8 < first ? first - byte * 8 : 0;
	uint64_t high = end - byte * 8 < 8 ? end - byte * 8 : 8;

	return (uint8_t)((0xffu << low) & (0xffu >> (8 - high)));
}

void ember_bits_set(uint8_t *bits, uint64_t first, uint64_t count)
{
	uint64_t end = first + count;

	if (!count)
		return;
	for (uint64_t byte = first / 8; byte <= (end - 1) / 8; byte++)
		__atomic_fetch_or(bits + byte, mask_of(byte, first, end), __ATOMIC_RELEASE);
}

void ember_bits_clear(uint8_t *bits, uint64_t first, uint64_t count)
{
	uint64_t end = first + count;

	if (!count)
		return;
	for (uint64_t byte = first / 8; byte <= (end - 1) / 8; byte++)
		__atomic_fetch_and(bits + byte, (uint8_t)~mask_of(byte, first, end),
				   __ATOMIC_RELEASE);
}

int64_t ember_bits_next_zero(const uint8_t *bits, uint64_t first, uint64_t end)
{
	bool aligned = (uintptr_t)bits % sizeof(uint64_t) == 0;
	uint64_t at = first;

	while (at < end) {
		if (aligned && at % 64 == 0 && end - at >= 64 &&
		    __atomic_load_n((const uint64_t *)(const void *)(bits + at / 8),
				    __ATOMIC_ACQUIRE) == UINT64_MAX) {
			at += 64;
			continue;
		}
		uint8_t byte = __atomic_load_n(bits + at / 8, __ATOMIC_ACQUIRE);

		if (byte == 0xff) {
			at = (at / 8 + 1) * 8;
			continue;
		}
		if (!(byte >> (at % 8) & 1))
			return (int64_t)at;
		at++;
	}
	return -1;
}
