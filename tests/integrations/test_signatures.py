"""The functions with other libraries' names: over the simulated group, against the oracle, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cp_fast
import cp_ref
from cp_fast.integrations import flash_attn, ring_flash_attn, sdpa
from cp_ref import SimGroup, dense_attention

FLASH_ATTN: Any = flash_attn
RING: Any = ring_flash_attn
SDPA_OURS: Any = sdpa
CU = torch.tensor([0, 16, 24, 48], dtype=torch.int32)
PACKED = {"qkv_format": "thd", "cu_seqlens_q": CU}


def tensors(*shape: int, heads_kv: int = 2) -> list[torch.Tensor]:
    """q, k, v and dout, 4 heads over `heads_kv`, d 8."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, heads_kv, heads_kv, 4)
    return [torch.randn(*shape, h, 8, generator=generator, dtype=torch.float64) for h in heads]


def check(
    call: Callable[..., Any],
    whole: list[torch.Tensor],
    expected: dict[str, Any],
    layout: Any = "dual_chunk",
    n: int = 2,
) -> None:
    """`call(q, k, v, cp=cp)` of the slices gives the oracle's out (and lse) and gradients."""
    fmt: dict[str, Any] = {"qkv_format": expected.get("qkv_format", "bshd")}
    padded: dict[str, Any] = {"cu_seqlens_padded": CU} if fmt["qkv_format"] == "thd" else {}
    *leaves, dout = (x.clone().requires_grad_() for x in whole)
    out, lse, _ = dense_attention(*leaves, **expected)
    grads = torch.autograd.grad(out, leaves, dout)

    def one(member: Any) -> list[torch.Tensor]:
        cp = cp_fast.ContextParallel(member, layout=layout)
        *local, upstream = (cp_fast.shard(x, cp=cp, **fmt, **padded) for x in whole)
        local = [x.requires_grad_() for x in local]
        results = call(*local, cp=cp)
        results = results if isinstance(results, tuple) else (results,)
        results[0].backward(upstream)
        found = [results[0], *(x.grad for x in local if x.grad is not None)]
        gathered = [cp_fast.unshard(x.detach(), cp=cp, **fmt, **padded) for x in found]
        if len(results) > 1:
            assert results[2] is None
            gathered.append(
                cp_fast.unshard(results[1].detach().movedim(-1, 1 if not padded else 0), cp=cp, **fmt, **padded)
            )
        return gathered

    for got in SimGroup(n).run(one):
        wanted = [out, *grads, lse.movedim(-1, 0 if padded else 1)]
        for x, y in zip(got, wanted, strict=False):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
        assert len(got) >= 4


SCALED = {"softmax_scale": 0.5, "softcap": 2.0}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {"attn_mask_type": "no_mask"}),
    "causal": ({"causal": True}, {"attn_mask_type": "causal"}),
    "window": ({"causal": True, "window_size": (3, 0)}, {"window_size": (3, 0)}),
    "both sides": ({"window_size": (3, 2)}, {"attn_mask_type": "no_mask", "window_size": (3, 2)}),
    "scaled": (SCALED, {"attn_mask_type": "no_mask", **SCALED}),
    "lse": ({"causal": True, "return_attn_probs": True}, {"attn_mask_type": "causal"}),
    "alibi": ({"causal": True, "alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "alibi, full": ({"alibi_slopes": SLOPES}, {"attn_mask_type": "no_mask", "alibi_slopes": SLOPES}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), DENSE.values(), ids=DENSE.keys())
def test_flash_attn(given: dict[str, Any], expected: dict[str, Any]) -> None:
    check(lambda *x, cp: FLASH_ATTN.flash_attn_func(*x, **given, cp=cp), tensors(2, 16), expected)
    packed = lambda *x, cp: FLASH_ATTN.flash_attn_varlen_func(*x, CU, CU.clone(), 24, 24, **given, cp=cp)  # noqa: E731
    check(packed, tensors(48), expected | PACKED)


def test_flash_attn_aligns_causal_masks_to_the_end() -> None:
    q, _, _, dout = tensors(2, 8)
    _, k, v, _ = tensors(2, 24)
    whole = [q, k, v, dout]
    of_batch = SLOPES * torch.tensor([[1.0], [2.0]])
    for given in ({"causal": True}, {"window_size": (-1, 0)}, {"causal": True, "alibi_slopes": of_batch}):
        call = lambda *x, cp, given=given: FLASH_ATTN.flash_attn_func(*x, **given, cp=cp)  # noqa: E731
        check(call, whole, {"attn_mask_type": "causal_bottom_right", "alibi_slopes": given.get("alibi_slopes")})


@pytest.mark.parametrize("window", [(3, 2), (9, -1), (-1, 4), (0, 5)])
@pytest.mark.parametrize("more", [{}, {"alibi_slopes": SLOPES, "return_attn_probs": True}], ids=["", "alibi, lse"])
@pytest.mark.one_in(3)
def test_windows_on_both_sides_are_aligned_to_the_end(window: tuple[int, int], more: dict[str, Any]) -> None:
    """Other lengths of q and k, longer and shorter, in the packed form and not."""
    (q, _, _, dout), (_, k, v, _) = tensors(36), tensors(48)
    cu_q, cu_k = torch.tensor([0, 4, 16, 36]), torch.tensor([0, 16, 20, 48])
    expected: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k}
    slopes = {"alibi_slopes": more["alibi_slopes"]} if more else {}
    areas = cp_fast.masks.documents(cu_q, cu_k, window_size=window)
    i, j = torch.arange(12)[:, None] + 4 - 12, torch.arange(4)
    seen = ((window[0] < 0) | (j >= i - window[0])) & ((window[1] < 0) | (j <= i + window[1]))  # flash-attn's rule
    of_second = cp_fast.masks.picture(areas, width=200).splitlines()[2 + 4 : 2 + 16]
    assert [[x != "." for x in row.split()[-48:][16:20]] for row in of_second] == seen.tolist()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = dense_attention(*leaves, areas=areas, **slopes, **expected)
    grads = torch.autograd.grad(out, leaves, dout)

    def one(member: Any) -> None:
        for layout in ("dual_chunk", "contiguous"):
            cp = cp_fast.ContextParallel(member, layout=layout)
            cuts = [{"cp": cp, "qkv_format": "thd", "cu_seqlens_padded": cu} for cu in (cu_q, cu_k, cu_k, cu_q)]
            *local, upstream = (cp_fast.shard(x, **cut) for x, cut in zip((q, k, v, dout), cuts, strict=True))
            local = [x.requires_grad_() for x in local]
            given = (cu_q, cu_k, 20, 28)
            found = FLASH_ATTN.flash_attn_varlen_func(*local, *given, window_size=window, **more, cp=cp)
            result = found[0] if more else found
            result.backward(upstream)
            torch.testing.assert_close(cp_fast.unshard(result.detach(), **cuts[0]), out.detach())
            if more:
                whole = cp_fast.unshard(found[1].detach().T.contiguous(), **cuts[0])
                torch.testing.assert_close(whole, lse.detach().T)
            for x, cut, want in zip(local, cuts, grads, strict=False):
                assert x.grad is not None
                torch.testing.assert_close(cp_fast.unshard(x.grad, **cut), want)

    SimGroup(2).run(one)
    (q, _, _, dout), (_, k, v, _) = tensors(2, 8), tensors(2, 20)
    lengths = {"cu_seqlens_q": torch.tensor([0, 8, 16]), "cu_seqlens_kv": torch.tensor([0, 20, 40])}
    areas = cp_fast.masks.documents(*lengths.values(), window_size=window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = dense_attention(
        *(x.flatten(0, 1) for x in leaves), qkv_format="thd", areas=areas, **slopes, **lengths
    )
    grads = torch.autograd.grad(out, leaves, dout.flatten(0, 1))

    def dense(member: Any) -> None:
        cp = cp_fast.ContextParallel(member)
        *local, upstream = (cp_fast.shard(x, cp=cp) for x in (q, k, v, dout))
        local = [x.requires_grad_() for x in local]
        found = FLASH_ATTN.flash_attn_func(*local, window_size=window, **more, cp=cp)
        result = found[0] if more else found
        result.backward(upstream)
        torch.testing.assert_close(cp_fast.unshard(result.detach(), cp=cp), out.detach().unflatten(0, (2, 8)))
        if more:
            whole = cp_fast.unshard(found[1].detach().movedim(1, 2).contiguous(), cp=cp)
            torch.testing.assert_close(whole, lse.detach().T.unflatten(0, (2, 8)))
        for x, want in zip(local, grads, strict=True):
            assert x.grad is not None
            torch.testing.assert_close(cp_fast.unshard(x.grad, cp=cp), want)

    SimGroup(2).run(dense)


@pytest.mark.parametrize(("given", "expected"), [DENSE[name] for name in ("full", "causal", "window", "lse", "alibi")])
def test_ring_flash_attn(given: dict[str, Any], expected: dict[str, Any]) -> None:
    zigzag = RING.zigzag_ring_flash_attn_func
    check(lambda *x, cp: zigzag(*x, **given, cp=cp), tensors(2, 16), expected)
    varlen = RING.zigzag_ring_flash_attn_varlen_func
    check(lambda *x, cp: varlen(*x, CU // cp.size, 24 // cp.size, **given, cp=cp), tensors(48), expected | PACKED)

    def llama3(*x: torch.Tensor, cp: cp_fast.ContextParallel) -> Any:
        prepared = RING.llama3_flash_attn_prepare_cu_seqlens(CU, True, cp.rank, cp.size)
        *lengths, local_k_slice = prepared
        return RING.llama3_flash_attn_varlen_func(*x, *lengths, 1, local_k_slice, **given, cp=cp)

    check(llama3, tensors(48), expected | PACKED, "contiguous")


RING_NAMES = ["zigzag_ring_flash_attn", "ring_flash_attn", "zigzag_ring_flash_attn_varlen", "ring_flash_attn_varlen"]


@pytest.mark.parametrize("given", [{}, {"causal": True, "return_attn_probs": True}], ids=["full", "causal, lse"])
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_varlen", *RING_NAMES, "llama3_flash_attn_varlen"])
def test_forms_of_one_tensor(name: str, given: dict[str, Any]) -> None:
    """q, k and v as one tensor, and k and v as one, are the same call."""
    module, varlen = RING if "ring" in name or "llama" in name else FLASH_ATTN, "varlen" in name
    layout = "dual_chunk" if "zigzag" in name or name.startswith("flash") else "contiguous"
    whole = tensors(48, heads_kv=4) if varlen else tensors(2, 16, heads_kv=4)
    lengths = {"ring": (CU // 2, 12), "llam": (CU, CU, 24, 24, 1, slice(0, 48)), "flas": (CU, CU, 24, 24)}
    more: Any = lengths["ring" if "ring" in name else name[:4]] if varlen else ()
    of_one = (CU, 24) if name == "flash_attn_varlen" else more

    def one(member: Any) -> list[Any]:
        cp = cp_fast.ContextParallel(member, layout=layout)
        fmt = {"qkv_format": "thd", "cu_seqlens_padded": CU} if varlen else {}
        q, k, v, _ = (cp_fast.shard(x, cp=cp, **fmt) for x in whole)
        kv, qkv = torch.stack([k, v], -3), torch.stack([q, k, v], -3)
        plain, of_kv, of_qkv = (getattr(module, f"{name}_{form}func") for form in ("", "kvpacked_", "qkvpacked_"))
        assert next(iter(inspect.signature(of_qkv).parameters)) == "qkv"
        assert of_qkv.__name__ == f"{name}_qkvpacked_func"
        results = [plain(q, k, v, *more, **given, cp=cp), of_kv(q, kv, *more, **given, cp=cp)]
        results.append(of_qkv(qkv, *of_one, **given, cp=cp))
        results = [x if isinstance(x, tuple) else (x,) for x in results]
        for odd, said in ((qkv, r"kv has shape .* must be \[\.\.\., 2, h, d\]"), (None, "kv is None")):
            with pytest.raises((ValueError, TypeError), match=said):
                of_kv(q, odd if member.rank else kv, *more, **given, softmax_scale=0.3, cp=cp)
        with pytest.raises(TypeError, match="no_such"):
            of_qkv(qkv, *of_one, no_such=1, cp=cp)
        return [[x for x in result if x is not None] for result in results]

    for first, *others in SimGroup(2).run(one):
        for other in others:
            assert len(first) == len(other) == (2 if given else 1)
            assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
def test_the_plain_ring_has_contiguous_parts(window: tuple[int, int]) -> None:
    given: dict[str, Any] = {"causal": True, "window_size": window}
    expected = {"attn_mask_type": "causal", "window_size": window}
    check(lambda *x, cp: RING.ring_flash_attn_func(*x, **given, cp=cp), tensors(2, 18), expected, "contiguous")
    *whole, dout = tensors(48)
    cu = torch.tensor([0, 18, 18, 48])
    leaves = [x.clone().requires_grad_() for x in whole]
    out, _, _ = dense_attention(*leaves, qkv_format="thd", cu_seqlens_q=cu, **expected)
    grads = torch.autograd.grad(out, leaves, dout)

    def one(member: Any) -> None:
        cp = cp_fast.ContextParallel(member, layout="contiguous")

        def mine(x: torch.Tensor) -> torch.Tensor:  # the r-th of equal parts of every sequence, as there
            return torch.cat([x[a:b].chunk(3)[member.rank] for a, b in ((0, 18), (18, 48))])

        q, k, v = (mine(x).requires_grad_() for x in whole)
        found = RING.ring_flash_attn_varlen_func(q, k, v, cu // 3, 10, **given, cp=cp)
        found.backward(mine(dout))
        for x, want in zip((found, q.grad, k.grad, v.grad), (out, *grads), strict=True):
            torch.testing.assert_close(x, mine(want), rtol=1e-10, atol=1e-10)

    SimGroup(3).run(one)


def test_names_without_a_function_name_their_replacement() -> None:
    for module, name, instead in (
        (RING, "stripe_flash_attn_func", "call zigzag_ring_flash_attn_func"),
        (RING, "stripe_flash_attn_qkvpacked_func", "call zigzag_ring_flash_attn_qkvpacked_func"),
        (RING, "substitute_hf_flash_attn", r"cp_fast\.integrations\.transformers\.prepare\(model, cp\)"),
        (RING, "update_ring_flash_attn_params", "shard_batch"),
        (FLASH_ATTN, "flash_attn_with_kvcache", "runs on one rank"),
        (cp_fast.thd, "generate_positional_ids_for_cp", r"cp_fast\.position_ids"),
        (cp_ref.thd, "generate_positional_ids_for_cp", r"cp_ref\.position_ids"),
    ):
        for words in (f"from {module.__name__} import {name}", f"import {module.__name__} as m; m.{name}"):
            with pytest.raises(ImportError, match=f"{name}; .*{instead}"):
                exec(words)
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(is_causal: bool) -> None:
    def call(*x: torch.Tensor, cp: cp_fast.ContextParallel) -> torch.Tensor:
        heads_first = (y.transpose(1, 2) for y in x)
        how = {"is_causal": is_causal, "scale": 0.5, "enable_gqa": True}
        return SDPA_OURS.scaled_dot_product_attention(*heads_first, **how, cp=cp).transpose(1, 2)

    whole = tensors(2, 16)
    mask = "causal" if is_causal else "no_mask"
    check(call, whole, {"attn_mask_type": mask, "softmax_scale": 0.5})
    q, k, v = (x.transpose(1, 2) for x in whole[:3])
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.5, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(theirs, dense_attention(*whole[:3], attn_mask_type=mask, softmax_scale=0.5)[0])


def test_sdpa_has_the_arguments_that_pytorch_documents() -> None:
    ours = list(inspect.signature(sdpa.scaled_dot_product_attention).parameters)
    head = str(F.scaled_dot_product_attention.__doc__).split("->")[0]
    theirs = [word.split("=")[0].strip(" ,*()\n") for word in head.partition("(")[2].split(",")]
    assert [name for name in theirs if name] == ours[:-1]


FLASH, ZIGZAG, SDPA = "flash_attn_func", "zigzag_ring_flash_attn_func", "scaled_dot_product_attention"
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (flash_attn, FLASH, {"dropout_p": 0.1}, r"dropout_p is 0\.1, .* dropout_p and dropout_seed"),
    (ring_flash_attn, ZIGZAG, {"dropout_p": 0.1}, r"dropout_p is 0\.1, .* dropout_p and dropout_seed"),
    (sdpa, SDPA, {"attn_mask": torch.zeros(8, 8)}, r"attn_mask is a tensor \[8, 8\]"),
    (sdpa, SDPA, {"dropout_p": 0.5}, r"dropout_p is 0\.5, .* dropout_p and dropout_seed"),
]


@pytest.mark.parametrize(("module", "name", "odd", "said"), REFUSED)
def test_what_cannot_be_honoured_is_named(module: Any, name: str, odd: dict[str, Any], said: str) -> None:
    q = torch.zeros(2, 8, 4, 8)

    def one(member: Any) -> None:
        with pytest.raises(NotImplementedError, match=said):
            getattr(module, name)(q, q, q, cp=cp_fast.ContextParallel(member), **odd)

    SimGroup(1).run(one)


def test_what_contradicts_itself_is_named() -> None:
    q, kv = torch.zeros(2, 8, 4, 8), torch.zeros(2, 16, 4, 8)
    packed = torch.zeros(24, 4, 8)

    def one(member: Any) -> None:
        zigzag, contiguous = cp_fast.ContextParallel(member), cp_fast.ContextParallel(member, layout="contiguous")
        with pytest.raises(NotImplementedError, match=r"window_size .* flash_attn_varlen_func takes every layout"):
            FLASH_ATTN.flash_attn_func(q, kv, kv, window_size=(3, 2), cp=contiguous)
        with pytest.raises(NotImplementedError, match=r"block_table is a tensor"):
            FLASH_ATTN.flash_attn_varlen_func(packed, packed, packed, CU, CU, 24, 24, block_table=CU, cp=zigzag)
        with pytest.raises(ValueError, match=r"max_seqlen_k is 16, but a sequence has 24 tokens"):
            FLASH_ATTN.flash_attn_varlen_func(packed, packed, packed, CU, CU, 24, 16, cp=zigzag)
        with pytest.raises(ValueError, match="layout 'contiguous'"):
            RING.zigzag_ring_flash_attn_func(q, q, q, cp=contiguous)
        with pytest.raises(ValueError, match="layout 'dual_chunk'"):
            RING.llama3_flash_attn_varlen_func(packed, packed, packed, CU, CU, 24, 24, 1, slice(0, 48), cp=zigzag)
        with pytest.raises(ValueError, match="heads_k_stride is 3"):
            RING.llama3_flash_attn_varlen_func(packed, packed, packed, CU, CU, 24, 24, 3, slice(0, 48), cp=contiguous)
        with pytest.raises(ValueError, match="keeps the global lengths"):
            RING.llama3_flash_attn_varlen_func(
                packed, packed, packed, CU, CU.clone(), 24, 24, 1, slice(24, 48), cp=contiguous
            )
        with pytest.raises(ValueError, match="enable_gqa"):
            SDPA_OURS.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, q[:, :, :2], q[:, :, :2])), cp=zigzag
            )

    SimGroup(2).run(one)


def test_layers_of_a_batch_share_a_plan() -> None:
    """Even where the lengths are changed in place there is another plan, and a bad argument raises on every rank."""

    def one(member: Any) -> list[int]:
        cp, lengths, made = cp_fast.ContextParallel(member), CU.clone(), []
        q, k, v, _ = (cp_fast.shard(x, cp=cp, qkv_format="thd", cu_seqlens_padded=CU) for x in tensors(48))
        for change in (False, False, True, False):
            if change:
                lengths[1] = 8
            cp_fast.attention(q, k, v, cp=cp, qkv_format="thd", cu_seqlens_q=lengths)
            made.append(len(cp.agreements.fingerprints))
        with pytest.raises(ValueError, match="head dim"):
            cp_fast.attention(
                q, k[..., :4] if member.rank else k, v, cp=cp, qkv_format="thd", cu_seqlens_q=CU, softcap=1.0
            )
        return made

    assert SimGroup(2).run(one) == [[1, 1, 2, 2]] * 2
