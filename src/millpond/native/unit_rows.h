// Rows as callers get them: finite, and of length 1 if they ask for that.
#pragma once

#include <cstdint>

#include "parallel.h"

// Divides rows [count, width] by their lengths if `unit`; whether all of their numbers are finite, and so are squares of
// lengths. Compiled for every processor, so that the bits are those of numpy (vectors/matryoshka.py) on each of them.
MILLPOND_HIDDEN bool finish_rows(float* rows, std::int64_t count, std::int64_t width, bool unit);
