"""Backend "cpu": which launches give a row the same bits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_fast.kernels.attention.backend_protocol import BackwardOperands, LaunchOptions
from cp_fast.kernels.attention.varlen_batch import VarlenBatch
from cp_ref.schedules.problem import ScoreSpec
from tests.cp_fast.backends.test_backends import CPU, tensors
from tests.marks import examples


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_row_has_the_same_bits_in_any_launch_whose_keys_begin_at_a_block_of_its_document(data: st.DataObject) -> None:
    """A fragment of a document's rows with the keys that it sees, and the whole document: out, lse and dq."""
    length = data.draw(st.integers(1, 600))
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    h_kv, g = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    d_qk, d_v = (data.draw(st.sampled_from([5, 8, 17, 33, 64, 75])) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    left, right = data.draw(st.sampled_from([(None, 0), (None, None), (200, 0), (40, 0)]))
    softcap = data.draw(st.sampled_from([0.0, 2.0]))
    whole = VarlenBatch.pack([length], [length], left, right)
    q, k, v, dout, dlse = tensors(length, whole, (h_kv * g, h_kv, d_qk, d_v), dtype)
    options = LaunchOptions(ScoreSpec(0.3, softcap), deterministic=True)

    def results(rows: slice, columns: slice) -> list[torch.Tensor]:
        segments = VarlenBatch.pack([rows.stop - rows.start], [columns.stop - columns.start], left, right)
        part = CPU.forward(q[rows], k[columns], v[columns], segments, options)
        operands = BackwardOperands(dout[rows], q[rows], k[columns], v[columns], part.out, part.lse, dlse[:, rows])
        return [part.out, part.lse.T, CPU.backward([operands], segments, options).dq]

    first = 0 if left is None else max(0, start - left) // 128 * 128
    some = results(slice(start, stop), slice(first, length if right is None else stop))
    for name, x, y in zip(("out", "lse", "dq"), some, results(slice(0, length), slice(0, length)), strict=True):
        assert torch.equal(x, y[start:stop]), name
