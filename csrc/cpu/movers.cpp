// Gathers and scatters of bytes.
#include "copy.h"
#include "entry_points.h"
#include "parallel.h"
#include "maps.h"

namespace cp {
namespace cpu {
namespace {

// Copies runs in order; each is prefetched before the previous one is copied.
class Runs {
 public:
  explicit Runs(const Move& move) : move_(move) {}

  void next(int64_t to, int64_t from, int64_t rows) {
    expect_row(move_, from);
    end();
    to_ = to;
    from_ = from;
    rows_ = rows;
  }
  void end() const { copy_rows(move_, to_, from_, rows_); }

 private:
  const Move& move_;
  int64_t to_ = 0, from_ = 0, rows_ = 0;
};

}  // namespace

void move_rows(const Move* moves, int64_t count, RowRule rows, bool scatter, Stream) {
  parallel(rows.count, row_bytes(moves, count), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < count; ++m) {
      Runs runs(moves[m]);
      walk(rows, begin, end, [&](int64_t i, int64_t row, int64_t n, const Place&) {
        runs.next(scatter ? row : i, scatter ? i : row, n);
      });
      runs.end();
    }
  });
}

}  // namespace cpu
}  // namespace cp
