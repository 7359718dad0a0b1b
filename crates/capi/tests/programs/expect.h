/* What the programs say of a failure, and random numbers that a seed decides. */
#ifndef EXPECT_H
#define EXPECT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <zebu.h>

/* Ends the program unless `fact` is true. */
#define EXPECT(fact)                                                                               \
	do {                                                                                       \
		if (!(fact)) {                                                                     \
			fprintf(stderr, "%s:%d: not so: %s (zebu: %s)\n", __FILE__, __LINE__, #fact, zebu_error()); \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* A number below `bound`. */
static inline uint32_t below(uint64_t *state, uint32_t bound)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)((*state >> 33) % bound);
}

#endif
