/* See inflate_isal.h. ISA-L's interface: igzip_lib.h, "inflate". */
#include "inflate_isal.h"

#include <errno.h>
#include <stdlib.h>

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
	self->state.crc_flag = ISAL_GZIP;
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
		return "incorrect data check";
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
