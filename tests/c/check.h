/*
 * CHECK: an assertion that stays in every build, says where it failed and ends the test program.
 */
#ifndef EMBER_CHECK_H
#define EMBER_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                 \
	do {                                                                             \
		if (!(condition)) {                                                      \
			fprintf(stderr, "%s:%d: %s: does not hold: %s\n", __FILE__,      \
				__LINE__, __func__, #condition);                         \
			exit(1);                                                         \
		}                                                                        \
	} while (0)

#define CHECK_EQ(actual, expected)                                                       \
	do {                                                                             \
		long long actual_ = (long long)(actual);                                 \
		long long expected_ = (long long)(expected);                             \
		if (actual_ != expected_) {                                              \
			fprintf(stderr, "%s:%d: %s: %s is %lld, expected %lld\n",        \
				__FILE__, __LINE__, __func__, #actual, actual_,          \
				expected_);                                              \
			exit(1);                                                         \
		}                                                                        \
	} while (0)

#endif
