// Partial results of attention put together: outputs weighted by their log-sum-exps.
#include <type_traits>

#include "convert.h"
#include "entry_points.h"
#include "lse_math.h"
#include "parallel.h"
#include "maps.h"

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

}  // namespace

void merge(Values out, Lse lse, Values step, Lse step_lse, RowRule rows, bool final, Stream) {
  int64_t shrunk = rows.kind == MapKind::half ? 2 : 1;
  visit(out.dtype, [&](auto* type) {
    with_sides_of<std::remove_pointer_t<decltype(type)>>(out, lse, step, step_lse, [&](auto sides) {
      parallel(rows.count, row_bytes(out), [&](int64_t begin, int64_t end) {
        walk(rows, begin, end, [&](int64_t i, int64_t row, int64_t n, const Place& place) {
          int64_t start = lse.packed ? 0 : place.begin, step_start = start / shrunk;
          for (int64_t k = 0; k < n; ++k) {
            Meeting m{row + k, i + k, place.sequence, row + k - start, i + k - step_start};
            if (final)
              sides.correct(m);
            else
              sides.merge(m);
          }
        });
      });
    });
  });
}

}  // namespace cpu
}  // namespace cp
