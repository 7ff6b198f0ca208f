/* Steps `@file@`, which needs no runtime. Written by `kd-export client`; change it as you like.
 *
 *   gcc -std=c99 -O2 -Wall -Wextra -c @file@
 *   @compiler@ -O2 -Wall -Wextra @client@.@suffix@ @stem@.o -o @client@ -lm
 *   ./@client@ */
#include <stdio.h>

#include "@stem@.h"

/* Numbers that are the same in every language, to compare. */
static double drawn(int64_t step, int64_t place, int64_t i) {
  return (double)((step * 7919 + place * 104729 + i * 1299709 + 12345) % 10007) / 10007.0;
}

int main(void) {
@declare@
  for (int step = 0; step < @steps@; ++step) {
@reset_call@
@fill@
    @call@
@print@
  }
  return 0;
}
