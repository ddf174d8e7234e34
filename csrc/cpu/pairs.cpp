// Rows of numbers onto rows of numbers, of any two float dtypes: converted, or added.
#include <type_traits>

#include "convert.h"
#include "entry_points.h"
#include "parallel.h"
#include "maps.h"

namespace cp {
namespace cpu {
namespace {

struct Copy {
  template <typename To, typename From>
  static void apply(To& to, const From& from) {
    if constexpr (std::is_same_v<To, From>)
      to = from;  // every bit, of a NaN too
    else
      store(to, load<Wide<To, From>>(from));
  }
};

struct Add {
  template <typename To, typename From>
  static void apply(To& to, const From& from) {
    using W = Wide<To, From>;
    store(to, load<W>(to) + load<W>(from));
  }
};

template <typename Op, typename To, typename From>
void apply_rows(const Values& to, const Values& from, int64_t to_row, int64_t from_row, int64_t count) {
  auto* target = static_cast<To*>(to.data) + to_row * to.row_stride;
  auto* source = static_cast<const From*>(from.data) + from_row * from.row_stride;
  int64_t rows = count, dim = to.dim;
  if (to.heads == 1 && to.row_stride == dim && from.row_stride == dim) {
    dim *= rows;
    rows = 1;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t h = 0; h < to.heads; ++h) {
      To* a = target + i * to.row_stride + h * to.head_stride;
      const From* b = source + i * from.row_stride + h * from.head_stride;
      for (int64_t k = 0; k < dim; ++k) Op::apply(a[k], b[k]);
    }
}

template <typename Op>
void apply_rows(const Pair& pair, int64_t to_row, int64_t from_row, int64_t count) {
  visit(pair.to.dtype, [&](auto* to) {
    visit(pair.from.dtype, [&](auto* from) {
      apply_rows<Op, std::remove_pointer_t<decltype(to)>, std::remove_pointer_t<decltype(from)>>(
          pair.to, pair.from, to_row, from_row, count);
    });
  });
}

int64_t row_bytes(const Pair* pairs, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += pairs[i].to.heads * pairs[i].to.dim * size_of(pairs[i].to.dtype);
  return sum;
}

}  // namespace

void put_values(const Pair* pairs, int64_t count, RowRule rows, bool add, Stream) {
  parallel(rows.count, row_bytes(pairs, count), [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < count; ++p)
      walk(rows, begin, end, [&](int64_t i, int64_t row, int64_t n, const Place&) {
        if (add)
          apply_rows<Add>(pairs[p], row, i, n);
        else
          apply_rows<Copy>(pairs[p], row, i, n);
      });
  });
}

}  // namespace cpu
}  // namespace cp
