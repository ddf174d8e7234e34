// numpy's arrays as the planner's loops get them: Python objects, read through the buffer protocol. Nothing is linked
// against Python and none of its headers is needed: Python hands in what is needed of its stable ABI.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <exception>

// What Python calls, by ctypes and holding the GIL. The answer is a number of elements or a set of bits. Where an array
// has another size or element than it must have, Python's error is set, which ctypes raises.
#define CP_PLAN extern "C" __attribute__((visibility("default"))) int64_t

namespace cp {
namespace plans {

using Object = void*;

// Py_buffer, which is the same in every release since 3.11.
struct View {
  void* data;
  Object owner;
  ssize_t bytes, item_bytes;
  int readonly, dims;
  char* format;
  ssize_t *shape, *strides, *suboffsets;
  void* internal;
};

struct Python {
  int (*get_buffer)(Object, View*, int);
  void (*release_buffer)(View*);
  ssize_t (*tuple_size)(Object);
  Object (*tuple_item)(Object, ssize_t);
  void (*set_error)(Object, const char*);
  Object kind_of_error;
};
extern Python python;

struct Wrong {};     // an array is not what it must be
struct HasError {};  // Python has set its error already

inline int64_t size_of(Object tuple) {
  ssize_t size = python.tuple_size(tuple);
  if (size < 0) throw HasError{};
  return size;
}

inline Object item(Object tuple, int64_t n) {
  Object found = python.tuple_item(tuple, n);
  if (!found) throw HasError{};
  return found;
}

// A contiguous array of `size` elements, held as long as this lives.
template <typename T>
class Array {
 public:
  Array(Object object, int64_t size, bool writable = false) {
    if (python.get_buffer(object, &view_, writable ? 1 : 0)) throw HasError{};
    if (view_.bytes != size * static_cast<ssize_t>(sizeof(T)) || view_.item_bytes != static_cast<ssize_t>(sizeof(T))) {
      python.release_buffer(&view_);
      throw Wrong{};
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { python.release_buffer(&view_); }
  T* data() const { return static_cast<T*>(view_.data); }
  T& operator[](int64_t i) const { return data()[i]; }

 private:
  View view_;
};

// f(I{}) for the integers of a plan: 64 bits or 32.
template <typename F>
int64_t typed(int64_t wide, F f) {
  try {
    return wide ? f(int64_t{}) : f(int32_t{});
  } catch (const Wrong&) {
    python.set_error(python.kind_of_error, "a planner's loop got an array of another size or dtype");
  } catch (const HasError&) {
  } catch (const std::exception& error) {  // no memory
    python.set_error(python.kind_of_error, error.what());
  }
  return -1;
}

}  // namespace plans
}  // namespace cp
