/* See inflate_isal.h. ISA-L's interface: igzip_lib.h, "inflate". */
#include "inflate_isal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_include) && !defined(EMBER_WITHOUT_ISAL)
#if __has_include(<isa-l/igzip_lib.h>)
#define WITH_ISAL 1
#endif
#endif

#ifdef WITH_ISAL
#include <isa-l/igzip_lib.h>

struct isal_stream {
	struct inflate_state state;
	const char *fault;
};

int isal_stream_built(void)
{
	return 1;
}

struct isal_stream *isal_stream_open(void)
{
	struct isal_stream *self = calloc(1, sizeof(*self));

	if (self)
		self->fault = "no fault";
	return self;
}

void isal_stream_member(struct isal_stream *self)
{
	isal_inflate_init(&self->state);
	self->state.crc_flag = ISAL_GZIP_NO_HDR_VER;
}

int isal_stream_block(struct isal_stream *self, unsigned bits, uint8_t byte,
		      const uint8_t *window, uint32_t window_bytes)
{
	isal_inflate_init(&self->state);
	self->state.crc_flag = ISAL_DEFLATE;
	if (window_bytes &&
	    isal_inflate_set_dict(&self->state, (uint8_t *)window, window_bytes) != ISAL_DECOMP_OK)
		return -EINVAL;
	self->state.read_in = bits ? byte >> (8 - bits) : 0;
	self->state.read_in_length = (int32_t)bits;
	return 0;
}

static const char *word_for(int rc)
{
	switch (rc) {
	case ISAL_INVALID_BLOCK:
		return "invalid deflate block";
	case ISAL_INVALID_SYMBOL:
		return "invalid deflate symbol";
	case ISAL_INVALID_LOOKBACK:
		return "invalid distance too far back";
	case ISAL_INVALID_WRAPPER:
		return "incorrect header check";
	case ISAL_UNSUPPORTED_METHOD:
		return "unknown compression method";
	case ISAL_INCORRECT_CHECKSUM:
		return "incorrect data check or length check";
	default:
		return "not a deflate stream";
	}
}

int isal_stream_run(struct isal_stream *self, const uint8_t **in, uint32_t *in_bytes,
		    uint8_t **out, uint32_t *out_bytes)
{
	struct inflate_state *state = &self->state;
	int rc;

	state->next_in = (uint8_t *)*in;
	state->avail_in = *in_bytes;
	state->next_out = *out;
	state->avail_out = *out_bytes;
	rc = isal_inflate(state);
	*in = state->next_in;
	*in_bytes = state->avail_in;
	*out = state->next_out;
	*out_bytes = state->avail_out;
	if (rc != ISAL_DECOMP_OK) {
		self->fault = word_for(rc);
		return ISAL_STREAM_FAULT;
	}
	if (state->block_state != ISAL_BLOCK_FINISH)
		return ISAL_STREAM_GOES_ON;
	return ISAL_STREAM_ENDED;
}

unsigned isal_stream_surplus(const struct isal_stream *self)
{
	return (unsigned)self->state.read_in_length / 8;
}

size_t isal_stream_pending(const struct isal_stream *self)
{
	return (size_t)(self->state.tmp_out_valid - self->state.tmp_out_processed);
}

int isal_stream_between(const struct isal_stream *self, uint64_t *bits_back)
{
	const struct inflate_state *state = &self->state;

	if (state->block_state != ISAL_BLOCK_HDR || isal_stream_pending(self))
		return 0;
	*bits_back = 8 * (uint64_t)state->tmp_in_size + (uint64_t)state->read_in_length;
	return 1;
}

uint32_t isal_stream_window(const struct isal_stream *self, uint8_t *window, uint32_t room)
{
	const struct inflate_state *state = &self->state;
	uint32_t valid = (uint32_t)state->tmp_out_valid;
	uint32_t count = valid < room ? valid : room;

	memcpy(window, state->tmp_out_buffer + (valid - count), count);
	return count;
}

uint32_t isal_stream_stride(const struct isal_stream *self)
{
	enum {
		/* The header of a block with codes of its own is longer, in all but tiny ones. */
		HEADER_BYTES = 24,
		/* That of a stored block is five bytes long. */
		STORED_HEADER_BYTES = 4,
	};

	if (self->state.block_state != ISAL_BLOCK_TYPE0)
		return HEADER_BYTES;
	if (self->state.type0_block_len <= 0)
		return STORED_HEADER_BYTES;
	return (uint32_t)self->state.type0_block_len;
}

const char *isal_stream_fault(const struct isal_stream *self)
{
	return self->fault;
}

void isal_stream_close(struct isal_stream *self)
{
	free(self);
}

#else

int isal_stream_built(void)
{
	return 0;
}

struct isal_stream *isal_stream_open(void)
{
	return NULL;
}

void isal_stream_member(struct isal_stream *self)
{
	(void)self;
}

int isal_stream_block(struct isal_stream *self, unsigned bits, uint8_t byte,
		      const uint8_t *window, uint32_t window_bytes)
{
	(void)self, (void)bits, (void)byte, (void)window, (void)window_bytes;
	return -ENOSYS;
}

int isal_stream_run(struct isal_stream *self, const uint8_t **in, uint32_t *in_bytes,
		    uint8_t **out, uint32_t *out_bytes)
{
	(void)self, (void)in, (void)in_bytes, (void)out, (void)out_bytes;
	return ISAL_STREAM_FAULT;
}

unsigned isal_stream_surplus(const struct isal_stream *self)
{
	(void)self;
	return 0;
}

size_t isal_stream_pending(const struct isal_stream *self)
{
	(void)self;
	return 0;
}

int isal_stream_between(const struct isal_stream *self, uint64_t *bits_back)
{
	(void)self, (void)bits_back;
	return 0;
}

uint32_t isal_stream_window(const struct isal_stream *self, uint8_t *window, uint32_t room)
{
	(void)self, (void)window, (void)room;
	return 0;
}

uint32_t isal_stream_stride(const struct isal_stream *self)
{
	(void)self;
	return 1;
}

const char *isal_stream_fault(const struct isal_stream *self)
{
	(void)self;
	return "built without ISA-L";
}

void isal_stream_close(struct isal_stream *self)
{
	(void)self;
}

#endif
