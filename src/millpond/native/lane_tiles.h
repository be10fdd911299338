// Packed rows of approximate search ("lanes"): [tiles][groups][16 rows][4 columns] bytes. A group is 4 columns, a tile 16
// rows. Columns from the width on are 0. One side of a product is unsigned: int8 + 128, which the caller takes off again.
#pragma once

#include <cstdint>

namespace {
namespace approximate {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t kLanes = 16, kGroup = 4, kTileGroup = kLanes * kGroup;

}  // namespace approximate
}  // namespace
