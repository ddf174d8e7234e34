// Which row of the whole each row of a part is: the arithmetic of all kinds of maps by lengths, the same for every
// device. A device searches in its own way for the sequence that holds a row's key; the rest is here, from that
// sequence's bounds:
//
//     key = key_of(plan, kind, row)                    what to look for in the lengths
//     place                                            the sequence that holds it: its number, begin, end
//     row = row_of(plan, kind, row, place, tail, run)  the row in the whole; -1 for none
//
// `run` becomes the number of rows that go on as this one does; it is not set, or not above 0, where no row up to the
// sequence's end has one in the whole. A device that moves row by row passes `NoRun`. The tail after the last sequence
// is one more sequence, which ends with the buffer. N is the type of row numbers. A plan is a `RowRule` that divides as
// its device does best: by_cp_size and by_slice (the rows of a rank's slice) have .divisor and .of(n), quotient(a, b)
// is a / b; real_at<N>(s) reads a real length. No number is negative while lengths are right.
#pragma once

#include "types.h"

namespace cp {

struct NoRun {
  template <typename N>
  CP_HD void operator=(N) {}
};

template <typename N, typename Plan>
CP_HD N key_of(const Plan& plan, MapKind kind, N row) {
  switch (kind) {
    case MapKind::slice:
      return row * plan.cp_size;
    case MapKind::rank_order:
      return (row - plan.by_slice.of(row) * static_cast<N>(plan.by_slice.divisor)) * plan.cp_size;
    case MapKind::half:
      return row * 2;
    default:
      return row;
  }
}

// Row `local` of a rank's slice (layout dual_chunk).
template <typename N, typename Plan, typename Place, typename Run>
CP_HD N slice_row(const Plan& plan, N local, N rank, const Place& place, bool tail, Run& run) {
  N offset = local - plan.by_cp_size.of(place.begin);
  if (tail) {
    N part = plan.by_cp_size.of(static_cast<N>(plan.tokens) - place.begin);
    run = part - offset;
    return place.begin + rank * part + offset;
  }
  N chunk = plan.by_cp_size.of(place.end - place.begin) / 2;
  run = (offset < chunk ? chunk : 2 * chunk) - offset;
  return offset < chunk ? place.begin + rank * chunk + offset
                        : place.begin + (static_cast<N>(2) * plan.cp_size - 1 - rank) * chunk + (offset - chunk);
}

// A row of sequence order -> its row in CP rank order, the ranks' slices one after the other.
template <typename N, typename Plan, typename Place, typename Run>
CP_HD N rank_order_row(const Plan& plan, N row, const Place& place, bool tail, Run& run) {
  N slice = static_cast<N>(plan.by_slice.divisor), start = plan.by_cp_size.of(place.begin), offset = row - place.begin;
  if (tail) {
    N part = plan.by_cp_size.of(static_cast<N>(plan.tokens) - place.begin), rank = plan.quotient(offset, part);
    run = part - (offset - rank * part);
    return rank * slice + start + offset - rank * part;
  }
  N chunk = plan.by_cp_size.of(place.end - place.begin) / 2, number = plan.quotient(offset, chunk),
    rest = offset - number * chunk;
  run = chunk - rest;
  return number < plan.cp_size ? number * slice + start + rest
                               : (static_cast<N>(2) * plan.cp_size - 1 - number) * slice + start + chunk + rest;
}

template <typename N, typename Plan, typename Place, typename Run>
CP_HD int64_t row_of(const Plan& plan, MapKind kind, N row, const Place& place, bool tail, Run& run) {
  int64_t result = -1;
  switch (kind) {
    case MapKind::slice:
      result = slice_row<N>(plan, row, plan.cp_rank, place, tail, run);
      break;
    case MapKind::rank_order: {
      N rank = plan.by_slice.of(row);
      result = slice_row<N>(plan, row - rank * static_cast<N>(plan.by_slice.divisor), rank, place, tail, run);
      break;
    }
    case MapKind::sequence_order:
      result = rank_order_row<N>(plan, row, place, tail, run);
      break;
    case MapKind::half: {
      if (tail && !plan.tail) return -1;
      N size = (tail ? static_cast<N>(plan.tokens) : place.end) - place.begin;
      run = size / 2 - (row - place.begin / 2);
      result = place.begin + plan.half * (size / 2) + row - place.begin / 2;
      break;
    }
    case MapKind::in_half: {
      if (tail) return -1;
      bool late = row - place.begin >= (place.end - place.begin) / 2;
      run = (1 + late) * ((place.end - place.begin) / 2) - (row - place.begin);
      result = late == (plan.half == 1) ? row : -1;
      break;
    }
    case MapKind::valid: {
      if (tail) return -1;
      N real = plan.template real_at<N>(place.sequence + 1) - plan.template real_at<N>(place.sequence);
      run = real - (row - place.begin);
      result = row - place.begin < real ? row : -1;
      break;
    }
    case MapKind::unpad: {
      N begin = plan.template real_at<N>(place.sequence);
      N stop = tail ? static_cast<N>(plan.tokens) : plan.template real_at<N>(place.sequence + 1);
      N source = begin + (row - place.begin);
      run = stop - source;
      result = source < stop ? source : -1;
      break;
    }
    default:
      break;
  }
  return result < plan.tokens ? result : -1;  // past the end only while lengths are wrong
}

}  // namespace cp
