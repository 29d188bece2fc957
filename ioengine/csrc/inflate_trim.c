/*
 * What of a restart point's window the bytes behind it reach back to; all else of it can be zero.
 *
 * The first 32 KiB behind the point are decoded twice, with windows that are false: the byte at
 * place p of one is p & 255, of the other p & 255 plus 1 + (p >> 8). A byte that comes out alike
 * both times came from the stream; one that differs came from the window, and the two say from
 * where, by whatever way. Farther behind nothing can reach into the window any more.
 */
#include "ember_io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
	WINDOW_BYTES = 32768,
	FARTHEST = 128,
	STRIDE_BYTES = 2048, /* ISA-L decodes ahead all that it is given */
};

/* Plain bytes that come out, 0 to WINDOW_BYTES; -errno. */
static int decode(const ember_inflate_point *at, const uint8_t *window, const uint8_t *input,
		  size_t in_bytes, uint8_t *output)
{
	ember_inflate_io io = { 0 };
	ember_inflate *inflate;
	size_t made = 0;
	int rc = ember_inflate_resume(&inflate, at, window, 1);

	if (rc < 0)
		return rc;
	do {
		io.input = input;
		io.in_bytes = in_bytes < STRIDE_BYTES ? in_bytes : STRIDE_BYTES;
		io.output = output + made;
		io.out_bytes = WINDOW_BYTES - made;
		rc = ember_inflate_step(inflate, &io);
		input += io.consumed;
		in_bytes -= io.consumed;
		made += io.produced;
	} while (rc >= 0 && made < WINDOW_BYTES && (in_bytes || io.produced));
	ember_inflate_close(inflate);
	return rc < 0 ? rc : (int)made;
}

/* One of the two false windows; it ends where the true one does. */
static void falsify(uint8_t *window, uint32_t window_bytes, int second)
{
	for (uint32_t i = 0; i < window_bytes; i++) {
		uint32_t place = WINDOW_BYTES - window_bytes + i;

		window[i] = (uint8_t)(place + (second ? 1 + (place >> 8) : 0));
	}
}

/* Zeroes what no byte of a and b comes from; -EINVAL if they cannot have come from the windows. */
static int keep_reached(uint8_t *window, uint32_t window_bytes, const uint8_t *a, const uint8_t *b,
			size_t count)
{
	uint8_t reached[WINDOW_BYTES] = { 0 };
	uint32_t first = WINDOW_BYTES - window_bytes;

	for (size_t i = 0; i < count; i++) {
		uint32_t apart = (uint8_t)(b[i] - a[i]);
		uint32_t place = (apart - 1) << 8 | a[i];

		if (!apart)
			continue;
		if (apart > FARTHEST || place < first)
			return -EINVAL;
		reached[place] = 1;
	}
	for (uint32_t i = 0; i < window_bytes; i++)
		if (!reached[first + i])
			window[i] = 0;
	return 1;
}

int ember_inflate_trim(const ember_inflate_point *at, uint8_t *window, const uint8_t *input,
		       size_t in_bytes, int is_all)
{
	uint8_t *space = malloc(3 * WINDOW_BYTES);
	uint8_t *out[2] = { space + WINDOW_BYTES, space + 2 * WINDOW_BYTES };
	int made[2];
	int rc = -ENOMEM;

	if (!space)
		goto out;
	rc = 0;
	if (!at->window_bytes || at->window_bytes > WINDOW_BYTES)
		goto out;
	for (int second = 0; second < 2; second++) {
		falsify(space, at->window_bytes, second);
		made[second] = decode(at, space, input, in_bytes, out[second]);
		if (made[second] < 0) {
			rc = made[second] == -EBADMSG ? 0 : made[second];
			goto out;
		}
	}
	if (made[0] != made[1] || (made[0] < WINDOW_BYTES && !is_all))
		goto out;
	rc = keep_reached(window, at->window_bytes, out[0], out[1], (size_t)made[0]);
	rc = rc == -EINVAL ? 0 : rc;
out:
	free(space);
	return rc;
}
