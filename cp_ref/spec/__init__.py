"""The contract that both implementations share: problems, masks, layouts, schedules as data. Standard library only."""

from cp_ref.spec.a2a import head_ranges
from cp_ref.spec.arguments import Sizes, check_offset, read_problem, read_sizes
from cp_ref.spec.calls import check_context, check_local_tensors, check_plan_owner, check_settled
from cp_ref.spec.features import Feature, Unsupported, describe
from cp_ref.spec.gathering import gathered_spans
from cp_ref.spec.given import OFFSET_GRADS, check_placements, local_part, one_a_head
from cp_ref.spec.group import Group, Parcel, Pending, agree
from cp_ref.spec.layout import Fragment, divisor, kv_fragments, local_slots, ownership, q_fragments
from cp_ref.spec.mask import Band, Rect
from cp_ref.spec.pair import PairGroup
from cp_ref.spec.plan_arguments import signature_of, split_plan_arguments
from cp_ref.spec.planners import make_program, make_schedule
from cp_ref.spec.problem import CP_COMM_TYPES, LAYOUTS, MASKS, QKV_FORMATS, SOFTMAX_TYPES, Problem, Sequence, Sequences
from cp_ref.spec.report import RankCost, Report, message_bytes, message_rows, report
from cp_ref.spec.room import Agreement, Room, check_room_tensors, next_batch, read_room
from cp_ref.spec.schedule import Message, Piece, Program, Schedule, Step, Tile
from cp_ref.spec.slices import position_spans, slice_axis, slice_spans, spans_of
from cp_ref.spec.units import Units, common, real_rows
from cp_ref.spec.values import check_choice, check_data, check_flag, read_count
from cp_ref.spec.verify import InvalidSchedule, verify

__all__ = [
    "CP_COMM_TYPES",
    "LAYOUTS",
    "MASKS",
    "OFFSET_GRADS",
    "QKV_FORMATS",
    "SOFTMAX_TYPES",
    "Agreement",
    "Band",
    "Feature",
    "Fragment",
    "Group",
    "InvalidSchedule",
    "Message",
    "PairGroup",
    "Parcel",
    "Pending",
    "Piece",
    "Problem",
    "Program",
    "RankCost",
    "Rect",
    "Report",
    "Room",
    "Schedule",
    "Sequence",
    "Sequences",
    "Sizes",
    "Step",
    "Tile",
    "Units",
    "Unsupported",
    "agree",
    "check_choice",
    "check_context",
    "check_data",
    "check_flag",
    "check_local_tensors",
    "check_offset",
    "check_placements",
    "check_plan_owner",
    "check_room_tensors",
    "check_settled",
    "common",
    "describe",
    "divisor",
    "gathered_spans",
    "head_ranges",
    "kv_fragments",
    "local_part",
    "local_slots",
    "make_program",
    "make_schedule",
    "message_bytes",
    "message_rows",
    "next_batch",
    "one_a_head",
    "ownership",
    "position_spans",
    "q_fragments",
    "read_count",
    "read_problem",
    "read_room",
    "read_sizes",
    "real_rows",
    "report",
    "signature_of",
    "slice_axis",
    "slice_spans",
    "spans_of",
    "split_plan_arguments",
    "verify",
]
