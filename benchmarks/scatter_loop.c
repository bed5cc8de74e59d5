/* The floor of scattered copies: the smallest loop over the same descriptors. Built when the suite `copy` runs. */
#include <stdint.h>
#include <string.h>

void
scatter_loop(const int64_t *pieces, int64_t count, char *destination, const char *source)
{
    for (const int64_t *piece = pieces; piece < pieces + 3 * count; piece += 3)
        memcpy(destination + piece[0], source + piece[1], (size_t)piece[2]);
}
