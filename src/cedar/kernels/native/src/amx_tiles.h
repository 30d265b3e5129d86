// Matrix tile registers: their shapes, set for a scope. Included by the amx variant only.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace cedar {
namespace CEDAR_ISA {

// The tile intrinsics of some compilers do not say which memory they read or write.
CEDAR_INLINE void compiler_fence(const void* memory) {
  __asm__ volatile("" ::"r"(memory) : "memory");
}

// The 64 bytes of LDTILECFG, palette 1.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int row_count, int bytes) {
    rows[tile] = static_cast<uint8_t>(row_count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// Sets shapes and puts back what was there: the thread may be torch's, and oneDNN uses tiles too.
// Tile contents are lost; nobody keeps them across a call.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes) {
    _tile_storeconfig(&before_);
    compiler_fence(&before_);
    compiler_fence(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~TileScope() {
    compiler_fence(&before_);
    if (before_.palette == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(&before_);
    }
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  TileShapes before_;
};

}  // namespace CEDAR_ISA
}  // namespace cedar
