"""Adapters: this project's packages and other libraries as implementations that the suite can play.

    python -m conformance --impl conformance.adapters.cp_fast:cpu
    python -m conformance --impl conformance.adapters.pytorch:flash --device cuda --cp-size 2

cp_ref, cp_fast       all levels, and what these bare names mean; cp_fast has an object for each of its backends
pytorch               torch.distributed.tensor.experimental.context_parallel
ring_flash_attn       zhuzilin/ring-flash-attention
yunchang              feifeibear/long-context-attention (USP)
transformer_engine    DotProductAttention with set_context_parallel_group
magi_attention        SandAI-org/MagiAttention

An adapter of a library says in a table what the library supports (`peers.SupportTable`), maps the suite's call
to the library's, and refuses what the library refuses. No adapter catches what the library raises: a crash inside that
table is a finding. Findings are in docs/conformance/findings.md.
"""
