"""The contract that both implementations share: problems, areas, ownership and schedules as data. Needs numpy alone."""

from cp_ref.spec.a2a import head_ranges
from cp_ref.spec.areas import UNBOUNDED, Areas
from cp_ref.spec.arguments import Sizes, check_offset, read_problem, read_sizes
from cp_ref.spec.calls import (
    check_context,
    check_global_lengths,
    check_local_tensors,
    check_plan_owner,
    check_settled,
    local_lengths,
)
from cp_ref.spec.comparing import BatchCost, compare_layouts
from cp_ref.spec.custom import check_schedule
from cp_ref.spec.features import Feature, Unsupported, describe
from cp_ref.spec.gathering import agreed_cut
from cp_ref.spec.given import AXES, check_placements, local_part, one_a_head
from cp_ref.spec.given_areas import AreaRow, areas_of_rows
from cp_ref.spec.group import Group, PaperGroup, Parcel, Pending, agree, read_together, tell
from cp_ref.spec.layout import divisor, slice_rows, table_of
from cp_ref.spec.mask import Band
from cp_ref.spec.overlap import check_apart
from cp_ref.spec.ownership import Fragments, Ownership, contiguous, dual_chunk
from cp_ref.spec.pair import PairGroup
from cp_ref.spec.planners import make_program, make_schedule, saved_kinds
from cp_ref.spec.problem import Problem, Sequence, Sequences
from cp_ref.spec.report import RankCost, Report, message_bytes, report, tile_pairs
from cp_ref.spec.rolling import Roll, roll_of
from cp_ref.spec.room import Agreement, Room, check_room_tensors, next_batch, read_room
from cp_ref.spec.schedule import KINDS, OPERANDS, RESULTS, Message, Pieces, RankSchedule, Schedule, Step, Tiles, tag
from cp_ref.spec.slices import Cut, planned_cut, planned_positions, read_cut, read_positions, sequences_of, slice_axis
from cp_ref.spec.table import Column, Table, joined, ranges
from cp_ref.spec.units import Units
from cp_ref.spec.values import (
    check_choice,
    check_data,
    check_flag,
    check_lengths,
    kind_of,
    read_count,
    read_lengths,
    read_window,
)
from cp_ref.spec.verify import InvalidSchedule, verify, verify_tables
from cp_ref.spec.words import (
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
from cp_ref.spec.workload import Workload, areas_of, workload_of

__all__ = [
    "AXES",
    "CP_COMM_TYPES",
    "KINDS",
    "LAYOUTS",
    "MASKS",
    "OFFSET_GRADS",
    "OPERANDS",
    "QKV_FORMATS",
    "RESULTS",
    "SOFTMAX_TYPES",
    "UNBOUNDED",
    "Agreement",
    "AreaRow",
    "Areas",
    "AttnMaskType",
    "Band",
    "BatchCost",
    "CPCommType",
    "Column",
    "Cut",
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
    "Roll",
    "Room",
    "Schedule",
    "Sequence",
    "Sequences",
    "Sizes",
    "SoftmaxType",
    "Step",
    "Table",
    "Tiles",
    "Units",
    "Unsupported",
    "Workload",
    "agree",
    "agreed_cut",
    "areas_of",
    "areas_of_rows",
    "check_apart",
    "check_choice",
    "check_context",
    "check_data",
    "check_flag",
    "check_global_lengths",
    "check_lengths",
    "check_local_tensors",
    "check_offset",
    "check_placements",
    "check_plan_owner",
    "check_room_tensors",
    "check_schedule",
    "check_settled",
    "compare_layouts",
    "contiguous",
    "describe",
    "divisor",
    "dual_chunk",
    "head_ranges",
    "joined",
    "kind_of",
    "local_lengths",
    "local_part",
    "make_program",
    "make_schedule",
    "message_bytes",
    "next_batch",
    "one_a_head",
    "planned_cut",
    "planned_positions",
    "ranges",
    "read_count",
    "read_cut",
    "read_lengths",
    "read_positions",
    "read_problem",
    "read_room",
    "read_sizes",
    "read_together",
    "read_window",
    "report",
    "roll_of",
    "saved_kinds",
    "sequences_of",
    "slice_axis",
    "slice_rows",
    "table_of",
    "tag",
    "tell",
    "tile_pairs",
    "verify",
    "verify_tables",
    "workload_of",
]
