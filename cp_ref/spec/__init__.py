"""The contract that both implementations share: problems, attention slices, ownership and schedules as data. Needs
numpy alone.
"""

from cp_ref.spec.arguments.argument_words import (
    CP_COMM_TYPES,
    LAYOUTS,
    MASKS,
    OFFSET_GRADS,
    QKV_FORMATS,
    SOFTMAX_TYPES,
    AttnMaskType,
    CPCommType,
    Layout,
    OffsetGrad,
    QKVFormat,
    SoftmaxType,
)
from cp_ref.spec.arguments.call_checks import (
    check_context,
    check_global_lengths,
    check_local_tensors,
    check_plan_owner,
    check_settled,
    check_uneven,
    local_lengths,
)
from cp_ref.spec.arguments.feature_sets import Feature, Unsupported, describe
from cp_ref.spec.arguments.given_tensors import AXES, check_placements, local_part, one_a_head
from cp_ref.spec.arguments.read_problem import SCORE_OPTIONS, Sizes, check_offset, read_problem, read_sizes
from cp_ref.spec.arguments.room import Agreement, Room, check_room_tensors, next_batch, read_room
from cp_ref.spec.arguments.shared_elements import check_apart
from cp_ref.spec.arguments.single_values import (
    check_choice,
    check_data,
    check_flag,
    check_lengths,
    kind_of,
    read_count,
    read_lengths,
    read_window,
)
from cp_ref.spec.groups.group import Group, PaperGroup, Parcel, Pending, agree, read_together, tell
from cp_ref.spec.groups.pair_group import PairGroup
from cp_ref.spec.layouts.agreed_cut import agreed_cut, bounds_of, read_fill
from cp_ref.spec.layouts.compare_layouts import BatchCost, compare_layouts
from cp_ref.spec.layouts.cuts import (
    Cut,
    planned_cut,
    planned_positions,
    read_cut,
    read_positions,
    sequences_of,
)
from cp_ref.spec.layouts.named_layouts import divisor, slice_rows, table_of
from cp_ref.spec.layouts.roll_rows import roll_of
from cp_ref.spec.linear.document_fragments import DocumentFragments, document_fragments
from cp_ref.spec.linear.halos import halo_workload, make_halo, make_rank_halo
from cp_ref.spec.linear.states import make_rank_states, make_states
from cp_ref.spec.linear.verify_states import verify_states
from cp_ref.spec.masks.read_areas import AttentionSliceRow, areas_of_rows
from cp_ref.spec.planners.a2a import head_ranges
from cp_ref.spec.planners.custom_schedule import check_schedule
from cp_ref.spec.planners.make_schedule import make_rank_schedule, make_schedule, saved_kinds
from cp_ref.spec.planners.ring_members import RingMembers
from cp_ref.spec.tables.attention_slices import UNBOUNDED, AttentionSlices
from cp_ref.spec.tables.diagonal_band import DiagonalBand
from cp_ref.spec.tables.messages import KINDS, OPERANDS, RESULTS, Message, Pieces, side_of, tag
from cp_ref.spec.tables.ownership import Fragments, Ownership, contiguous, dual_chunk
from cp_ref.spec.tables.problem import Problem, Sequence, Sequences
from cp_ref.spec.tables.row_positions import check_one_document, row_positions
from cp_ref.spec.tables.schedule import RankSchedule, Scans, Schedule, Step, Tiles
from cp_ref.spec.tables.score_options import ScoreOptions
from cp_ref.spec.tables.table import Column, Table, joined, ranges
from cp_ref.spec.tables.workload import Workload
from cp_ref.spec.verify.proof import InvalidSchedule, verify, verify_tables
from cp_ref.spec.verify.schedule_costs import ITEM_BYTES, RankCost, Report, message_bytes, report, tile_pairs

__all__ = [
    "AXES",
    "CP_COMM_TYPES",
    "ITEM_BYTES",
    "KINDS",
    "LAYOUTS",
    "MASKS",
    "OFFSET_GRADS",
    "OPERANDS",
    "QKV_FORMATS",
    "RESULTS",
    "SCORE_OPTIONS",
    "SOFTMAX_TYPES",
    "UNBOUNDED",
    "Agreement",
    "AttentionSliceRow",
    "AttentionSlices",
    "AttnMaskType",
    "BatchCost",
    "CPCommType",
    "Column",
    "Cut",
    "DiagonalBand",
    "DocumentFragments",
    "Feature",
    "Fragments",
    "Group",
    "InvalidSchedule",
    "Layout",
    "Message",
    "OffsetGrad",
    "Ownership",
    "PairGroup",
    "PaperGroup",
    "Parcel",
    "Pending",
    "Pieces",
    "Problem",
    "QKVFormat",
    "RankCost",
    "RankSchedule",
    "Report",
    "RingMembers",
    "Room",
    "Scans",
    "Schedule",
    "ScoreOptions",
    "Sequence",
    "Sequences",
    "Sizes",
    "SoftmaxType",
    "Step",
    "Table",
    "Tiles",
    "Unsupported",
    "Workload",
    "agree",
    "agreed_cut",
    "areas_of_rows",
    "bounds_of",
    "check_apart",
    "check_choice",
    "check_context",
    "check_data",
    "check_flag",
    "check_global_lengths",
    "check_lengths",
    "check_local_tensors",
    "check_offset",
    "check_one_document",
    "check_placements",
    "check_plan_owner",
    "check_room_tensors",
    "check_schedule",
    "check_settled",
    "check_uneven",
    "compare_layouts",
    "contiguous",
    "describe",
    "divisor",
    "document_fragments",
    "dual_chunk",
    "halo_workload",
    "head_ranges",
    "joined",
    "kind_of",
    "local_lengths",
    "local_part",
    "make_halo",
    "make_rank_halo",
    "make_rank_schedule",
    "make_rank_states",
    "make_schedule",
    "make_states",
    "message_bytes",
    "next_batch",
    "one_a_head",
    "planned_cut",
    "planned_positions",
    "ranges",
    "read_count",
    "read_cut",
    "read_fill",
    "read_lengths",
    "read_positions",
    "read_problem",
    "read_room",
    "read_sizes",
    "read_together",
    "read_window",
    "report",
    "roll_of",
    "row_positions",
    "saved_kinds",
    "sequences_of",
    "side_of",
    "slice_rows",
    "table_of",
    "tag",
    "tell",
    "tile_pairs",
    "verify",
    "verify_states",
    "verify_tables",
]
