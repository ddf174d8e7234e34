// Partial results of attention put together: outputs weighted by their log-sum-exps.
#include <type_traits>

#include "convert.h"
#include "entry_points.h"
#include "lse_math.h"
#include "parallel.h"
#include "runs.h"

namespace cp {
namespace cpu {
namespace {

// One row of an accumulator and the row of a step that meets it.
struct Meeting {
  int64_t out_row, step_row;
  int64_t sequence, lse_row, step_lse_row;
};

// The accumulator and the step of one call. W is the type that sums are formed in.
template <typename W, typename Out, typename Step>
struct Sides {
  Values out, step;
  LseRows<W> lse, step_lse;

  Out* out_at(const Meeting& m, int64_t head) const {
    return static_cast<Out*>(out.data) + m.out_row * out.row_stride + head * out.head_stride;
  }
  const Step* step_at(const Meeting& m, int64_t head) const {
    return static_cast<const Step*>(step.data) + m.step_row * step.row_stride + head * step.head_stride;
  }

  void merge(const Meeting& m) const {
    for (int64_t h = 0; h < out.heads; ++h) {
      int64_t at = lse.at(m.sequence, h, m.lse_row);
      auto w = merge_weights<W>(lse.get(at), step_lse.get(step_lse.at(m.sequence, h, m.step_lse_row)));
      lse.set(at, w.lse);
      Out* to = out_at(m, h);
      const Step* from = step_at(m, h);
      if (w.reads_out && w.reads_step)
        for (int64_t k = 0; k < out.dim; ++k) store(to[k], load<W>(to[k]) * w.kept + load<W>(from[k]) * w.step);
      else if (w.reads_step)
        for (int64_t k = 0; k < out.dim; ++k) store(to[k], load<W>(from[k]));
      else if (!w.reads_out)
        for (int64_t k = 0; k < out.dim; ++k) store(to[k], W(0));
    }
  }

  void correct(const Meeting& m) const {
    for (int64_t h = 0; h < out.heads; ++h) {
      W part = step_lse.get(step_lse.at(m.sequence, h, m.step_lse_row));
      if (is_empty(part)) continue;
      W weight = correction_weight(lse.get(lse.at(m.sequence, h, m.lse_row)), part);
      Out* to = out_at(m, h);
      const Step* from = step_at(m, h);
      for (int64_t k = 0; k < out.dim; ++k) store(to[k], load<W>(to[k]) + weight * load<W>(from[k]));
    }
  }
};

bool wide(Dtype a, Dtype b, const Lse& c, const Lse& d) {
  return a == Dtype::f64 || b == Dtype::f64 || c.dtype == Dtype::f64 || d.dtype == Dtype::f64;
}

// Call f(Sides of the right types).
template <typename Out, typename F>
void with_sides_of(const Values& out, const Lse& lse, const Values& step, const Lse& step_lse, F f) {
  visit(step.dtype, [&](auto* step_type) {
    using Step = std::remove_pointer_t<decltype(step_type)>;
    if constexpr (std::is_same_v<Wide<Out, Step>, float>)
      if (!wide(out.dtype, step.dtype, lse, step_lse))
        return f(Sides<float, Out, Step>{out, step, LseRows<float>{lse}, LseRows<float>{step_lse}});
    f(Sides<double, Out, Step>{out, step, LseRows<double>{lse}, LseRows<double>{step_lse}});
  });
}

int64_t row_bytes(const Values& out) { return out.heads * (out.dim + 16) * 8; }  // about: an exp costs like 16 elements

// Every row of the map, a step's row i with an accumulator's row map(i).
template <typename Map, typename F>
void each_meeting(const Map& map, const Lengths& lengths, const Lse& lse, int64_t bytes, F f) {
  bool packed = lse.packed;
  int64_t shrunk = map.key(1);  // 2 where the step has halves
  parallel(map.rows(), bytes, [&, packed, shrunk](int64_t begin, int64_t end) {
    each_run(map, lengths, begin, end, [&](int64_t i, int64_t row, int64_t rows, const Place& place) {
      int64_t start = packed ? 0 : place.start, step_start = packed ? 0 : place.start / shrunk;
      for (int64_t k = 0; k < rows; ++k)
        f(Meeting{row + k, i + k, place.sequence, row + k - start, i + k - step_start});
    });
  });
}

}  // namespace

void merge(Values out, Lse lse, Values step, Lse step_lse, RowSet rows, Stream) {
  visit(out.dtype, [&](auto* type) {
    with_sides_of<std::remove_pointer_t<decltype(type)>>(out, lse, step, step_lse, [&](auto sides) {
      parallel(rows.count, row_bytes(out), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) sides.merge(Meeting{rows[i], i, 0, rows[i], i});
      });
    });
  });
}

void lse_correction(Lse lse, Lse step_lse, Lengths lengths, Stream) {
  HalfMap map{lengths[lengths.sequences], 1};
  auto run = [&](auto zero) {
    using W = decltype(zero);
    LseRows<W> to{lse}, from{step_lse};
    each_meeting(map, lengths, lse, lse.heads * 64, [&](const Meeting& m) {
      for (int64_t h = 0; h < lse.heads; ++h) {
        int64_t at = to.at(m.sequence, h, m.lse_row);
        to.set(at, merge_lse<W>(to.get(at), from.get(from.at(m.sequence, h, m.step_lse_row))));
      }
    });
  };
  if (lse.dtype == Dtype::f64 || step_lse.dtype == Dtype::f64)
    run(double{});
  else
    run(float{});
}

void out_correction(Values out, Values step, Lse lse, Lse step_lse, Lengths lengths, bool only_second_half, Stream) {
  int64_t tokens = lengths[lengths.sequences];
  visit(out.dtype, [&](auto* type) {
    with_sides_of<std::remove_pointer_t<decltype(type)>>(out, lse, step, step_lse, [&](auto sides) {
      auto correct = [&](const Meeting& m) { sides.correct(m); };
      if (only_second_half)
        each_meeting(HalfMap{tokens, 1}, lengths, lse, row_bytes(out), correct);
      else
        each_meeting(WholeMap{tokens}, lengths, lse, row_bytes(out), correct);
    });
  });
}

}  // namespace cpu
}  // namespace cp
