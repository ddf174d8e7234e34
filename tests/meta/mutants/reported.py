"""Mutants of `cp_ref` that make a mistake that was reported of another system: the known case has to see it."""

from __future__ import annotations

__all__ = ["REPORTED"]

REPORTED = {  # known case -> mutant
    "te-3331": "padding-counted-by-division",
    "te-1930": "last-real-token-lost",
    "te-2829": "wrong-half-of-a-block",
    "te-2186": "padding-in-the-gradients",
    "te-1557": "dq-of-the-last-step-lost",
    "te-1054": "dkv-copied-not-added",
    "te-909": "chunks-in-another-order",
    "te-716": "merge-without-a-maximum",
    "te-3528": "empty-rows-are-nan",
    "te-3532": "minus-one-taken-literally",
    "te-3551": "sink-dropped",
    "te-1467": "lse-heads-and-rows-exchanged",
    "te-821": "partial-outputs-in-bf16",
    "te-2892": "padding-is-attended",
    "te-3205": "tail-never-written",
    "rfa-42": "dq-in-bf16",
    "rfa-22": "partial-outputs-in-bf16",
    "rfa-87": "dq-always-bf16",
    "easycontext-14": "merge-without-a-maximum",
    "prime-rl-2828": "window-dropped",
    "prime-rl-3397": "sink-dropped",
    "prime-rl-3042": "replicated-kv-heads-not-summed",
    "usp-72": "merge-without-a-maximum",
    "megatron-1341": "a2a-rank-before-p2p-rank",
    "magi-239": "max-logit-of-one-rank",
    "torchtitan-3206": "batch-and-sequence-exchanged",
    "accelerate-4177": "window-dropped",
    "trl-6843": "documents-joined",
    "diffusers-14265": "stale-kv-in-the-backward",
    "automodel-3157": "dk-heads-rotated",
    "automodel-2384": "dout-strides-ignored",
    "deepspeed-5808": "batch-and-sequence-exchanged",
    "megatron-1464": "dq-of-the-last-step-lost",
    "megatron-1764": "empty-rows-are-nan",
    "megatron-5597": "halo-one-short",
}
